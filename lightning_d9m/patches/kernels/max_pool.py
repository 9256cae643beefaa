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
from lightning_d9m.patches.exact_sums import Part, accumulate, plan_pieces
from lightning_d9m.patches.kernels.places import find_last
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
    return _add_chosen(grad_output, self, indices, 3, kernel_size, keep_format=True)


def _adaptive_backward(grad_output: Tensor, self: Tensor, indices: Tensor, *, dims: int) -> Tensor:
    """Return the gradient of an adaptive max pooling with respect to its input."""
    keep_format = dims == 2  # noqa: PLR2004 - as torch's kernels
    return _add_chosen(grad_output, self, indices, dims, keep_format=keep_format)


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
    *,
    keep_format: bool = False,
) -> Tensor:
    """Return the sums of the gradients of the outputs that chose each input.

    An input has as many places in windows with different starts as a window has places.
    """
    require(
        self.dim() in {dims + 1, dims + 2},
        grad_output.dim() == self.dim(),
        grad_output.shape[:-dims] == self.shape[:-dims],
        grad_output.dtype == self.dtype,
        self.is_floating_point(),
        0 not in (*self.shape[1:], *grad_output.shape[-dims:]),
        indices.shape == grad_output.shape,
        indices.dtype == torch.int64,
    )
    planes, outputs = prod(self.shape[:-dims]), prod(grad_output.shape[-dims:])
    result = allocate(self.shape, self.dtype, self.device)
    places = indices.reshape(1, planes, outputs, 1)
    part = Part(places, grad_output.reshape(planes, 1, outputs, 1).contiguous())
    sums = result.view(planes, 1, prod(self.shape[-dims:]), 1)
    pieces = plan_pieces(self.dtype, outputs)
    if kernel_size:
        pieces = plan_pieces(self.dtype, prod(kernel_size) ** (dims // len(kernel_size)), _GUARD)
    accumulate(sums, part, pieces, include=False)
    if keep_format and not self.is_contiguous():
        memory_format = suggest_memory_format(self)
        return torch.empty_like(result, memory_format=memory_format).copy_(result)
    return result


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
    require(
        self.dim() in {dims + 1, dims + 2},
        indices.dtype == torch.int64,
        indices.shape == self.shape,
        len(output_size) == dims,
        0 not in self.shape[-dims - 1 :],
        self.is_floating_point(),
    )
    planes, size = prod(self.shape[:-dims]), prod(self.shape[-dims:])
    last = find_last(indices.reshape(planes, size), prod(output_size))
    values = self.reshape(planes, size).gather(1, last.clamp(min=0))
    return torch.where(last >= 0, values, 0).view(*self.shape[:-dims], *output_size)
