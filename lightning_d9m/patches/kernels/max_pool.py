"""Gradients of max pooling, and max unpooling: values that go where indices say.

torch's CUDA kernels start one thread per output: gradients add to the chosen input with atomics,
and unpooling races for a place. Here sums are exact, see ``exact_sums``, and of several values for
one place the last is written, as by torch's CPU kernels on one thread.
"""

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format

from lightning_d9m.patches.arguments import require
from lightning_d9m.patches.exact_sums import plan_pieces
from lightning_d9m.patches.kernels.updates import add_rows, find_last
from lightning_d9m.patches.triton.launch import allocate

_GUARD = 24  # bits that a single piece keeps of the few windows of one input


def max_pool3d_with_indices_backward(
    grad_output: Tensor,
    self: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
    indices: Tensor,
) -> Tensor:
    """Return the gradient of ``max_pool3d`` with respect to its input."""
    shape: tuple[Any, ...] = (kernel_size, stride, padding, dilation, ceil_mode)
    pooled = torch.max_pool3d(self.new_empty(self.shape, device="meta"), *shape)
    require(pooled.shape == grad_output.shape)
    return _add_chosen(grad_output, self, indices, 3, kernel_size, format_of=self)


def _adaptive_backward(grad_output: Tensor, self: Tensor, indices: Tensor, *, dims: int) -> Tensor:
    """Return the gradient of an adaptive max pooling with respect to its input."""
    format_of = self if dims == 2 else None  # noqa: PLR2004 - as torch's kernels
    return _add_chosen(grad_output, self, indices, dims, format_of=format_of)


def _fractional_backward(
    grad_output: Tensor,
    self: Tensor,
    kernel_size: Sequence[int],
    output_size: Sequence[int],
    indices: Tensor,
    *,
    dims: int,
) -> Tensor:
    """Return the gradient of a fractional max pooling with respect to its input."""
    require(list(output_size) == list(grad_output.shape[-dims:]))
    return _add_chosen(grad_output, self, indices, dims, kernel_size)


adaptive_max_pool2d_backward = partial(_adaptive_backward, dims=2)
adaptive_max_pool3d_backward = partial(_adaptive_backward, dims=3)
fractional_max_pool2d_backward = partial(_fractional_backward, dims=2)
fractional_max_pool3d_backward = partial(_fractional_backward, dims=3)


def _add_chosen(
    grad_output: Tensor,
    self: Tensor,
    indices: Tensor,
    dims: int,
    kernel_size: Sequence[int] = (),
    format_of: Tensor | None = None,
) -> Tensor:
    """Return the sums of the gradients of the outputs that chose each input.

    An input has as many places in windows with different starts as a window has places.
    """
    shape, given = self.shape, grad_output.shape
    _require_planes(grad_output, indices, dims)
    require(
        given[:-dims] == shape[:-dims],
        grad_output.dtype == self.dtype,
        0 not in (*shape[1:], *given[-dims:]),
    )
    planes, outputs = prod(shape[:-dims]), prod(given[-dims:])
    pieces = plan_pieces(self.dtype, outputs)
    if kernel_size:
        pieces = plan_pieces(self.dtype, prod(kernel_size) ** (dims // len(kernel_size)), _GUARD)
    result = allocate((planes, prod(shape[-dims:])), self.dtype, self.device)
    places, values = (part.reshape(planes, outputs) for part in (indices, grad_output))
    add_rows(result, places, values, 1, include=False, pieces=pieces)
    result = result.view(shape)
    if format_of is None or format_of.is_contiguous():
        return result
    memory_format = suggest_memory_format(format_of)
    return torch.empty_like(result, memory_format=memory_format).copy_(result)


def _require_planes(values: Tensor, indices: Tensor, dims: int) -> None:
    require(
        values.dim() in {dims + 1, dims + 2},
        values.is_floating_point(),
        indices.shape == values.shape,
        indices.dtype == torch.int64,
    )


def max_unpool2d(self: Tensor, indices: Tensor, output_size: Sequence[int]) -> Tensor:
    """Return zeros with each value at the position in its plane that its index names."""
    return _unpool(self, indices, output_size, 2)


def max_unpool3d(
    self: Tensor,
    indices: Tensor,
    output_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
) -> Tensor:
    """Return zeros with each value at the position in its volume that its index names."""
    dims = 3
    require(len(stride) == len(padding) == dims, min(stride) > 0)
    return _unpool(self, indices, output_size, dims)


def _unpool(self: Tensor, indices: Tensor, output_size: Sequence[int], dims: int) -> Tensor:
    _require_planes(self, indices, dims)
    require(len(output_size) == dims, 0 not in self.shape[-dims - 1 :])
    planes, size = prod(self.shape[:-dims]), prod(self.shape[-dims:])
    last = find_last(indices.reshape(planes, size), prod(output_size))
    values = self.reshape(planes, size).gather(1, last.clamp(min=0))
    return torch.where(last >= 0, values, 0).view(*self.shape[:-dims], *output_size)
