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

from lightning_d9m.patches.arguments import Function, lay_out, require
from lightning_d9m.patches.exact_sums import plan_pieces
from lightning_d9m.patches.kernels.updates import find_last, plan_sum
from lightning_d9m.patches.triton.launch import allocate

_GUARD = 24  # bits that a single piece keeps of the few windows of one input


def _backward(
    grad_output: Tensor, self: Tensor, *more: Any, dims: int, keeps_format: bool = False
) -> Function:
    """Return what returns the gradient of a max pooling with respect to its input.

    The arguments between the input and the last one, the indices, are those of the pooling. An
    input has as many places in windows with different starts as a window has places.
    """
    *window, indices = more
    shape, given = self.shape, grad_output.shape
    _require_planes(grad_output, indices, dims)
    require(
        given[:-dims] == shape[:-dims],
        grad_output.dtype == self.dtype,
        0 not in (*shape[1:], *given[-dims:]),
    )
    planes, outputs, inputs = prod(shape[:-dims]), prod(given[-dims:]), prod(shape[-dims:])
    pieces = plan_pieces(self.dtype, outputs)
    if window:
        kernel_size, *rest = window
        pooled = rest[0]  # of a fractional pooling
        if len(rest) > 1:
            pooled = torch.max_pool3d(self.new_empty(shape, device="meta"), *window).shape[-dims:]
        require(list(pooled) == list(given[-dims:]))
        pieces = plan_pieces(self.dtype, prod(kernel_size) ** (dims // len(kernel_size)), _GUARD)
    size, wanted = (planes, inputs), (planes, outputs)
    add = plan_sum(self.dtype, size, indices, wanted, 1, include=False, pieces=pieces)
    memory_format = suggest_memory_format(self) if keeps_format else torch.contiguous_format

    def run(grad_output: Tensor, *more: Any) -> Tensor:
        result = allocate(shape, grad_output.dtype, grad_output.device)
        add(result, more[-1], grad_output)
        return lay_out(result, memory_format)

    return run


max_pool3d_with_indices_backward = partial(_backward, dims=3, keeps_format=True)
adaptive_max_pool2d_backward = partial(_backward, dims=2, keeps_format=True)
adaptive_max_pool3d_backward = fractional_max_pool3d_backward = partial(_backward, dims=3)
fractional_max_pool2d_backward = partial(_backward, dims=2)


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
