"""Gradients of max pooling: what the windows that chose an input add to it.

torch's CUDA kernels start one thread per output and add to the chosen input with atomics. Here the
sums are exact; see ``exact_sums``.
"""

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format

from lightning_d9m.patches.exact_sums import Part, Pieces, accumulate, plan_pieces
from lightning_d9m.patches.primitives.fallback import Original, raise_as_original
from lightning_d9m.patches.triton.launch import allocate

_GUARD = 24  # bits that a single piece keeps of the few windows of one input


def max_pool3d_backward(  # noqa: PLR0913, PLR0917 - torch's arguments
    original: Original,
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
    dims = 3
    shape = (kernel_size, stride, padding, dilation, ceil_mode)
    if not (_can_choose(grad_output, self, indices, dims) and _has_shape(grad_output, self, shape)):
        raise_as_original(original, grad_output, self, *shape, indices)
    # An input has as many places in windows as a window has.
    pieces = plan_pieces(self.dtype, prod(kernel_size) ** (dims // len(kernel_size)), _GUARD)
    return _add_chosen(grad_output, self, indices, dims, pieces, keep_format=True)


def _adaptive_backward(
    original: Original, grad_output: Tensor, self: Tensor, indices: Tensor, *, dims: int
) -> Tensor:
    """Return the gradient of an adaptive max pooling with respect to its input."""
    if not _can_choose(grad_output, self, indices, dims):
        raise_as_original(original, grad_output, self, indices)
    pieces = plan_pieces(self.dtype, prod(grad_output.shape[-dims:]))
    return _add_chosen(grad_output, self, indices, dims, pieces, keep_format=dims == 2)  # noqa: PLR2004 - as torch's kernels


def _fractional_backward(
    original: Original,
    grad_output: Tensor,
    self: Tensor,
    kernel_size: Sequence[int],
    output_size: Sequence[int],
    indices: Tensor,
    *,
    dims: int,
) -> Tensor:
    """Return the gradient of a fractional max pooling with respect to its input."""
    if not _can_choose(grad_output, self, indices, dims) or list(output_size) != list(
        grad_output.shape[-dims:]
    ):
        raise_as_original(original, grad_output, self, kernel_size, output_size, indices)
    pieces = plan_pieces(self.dtype, prod(output_size))
    return _add_chosen(grad_output, self, indices, dims, pieces, keep_format=False)


adaptive_max_pool2d_backward = partial(_adaptive_backward, dims=2)
adaptive_max_pool3d_backward = partial(_adaptive_backward, dims=3)
fractional_max_pool2d_backward = partial(_fractional_backward, dims=2)
fractional_max_pool3d_backward = partial(_fractional_backward, dims=3)


def _add_chosen(
    grad_output: Tensor,
    self: Tensor,
    indices: Tensor,
    dims: int,
    pieces: Pieces,
    *,
    keep_format: bool,
) -> Tensor:
    planes, outputs = prod(self.shape[:-dims]), prod(grad_output.shape[-dims:])
    result = allocate(self.shape, self.dtype, self.device)
    places = indices.reshape(planes, outputs, 1)
    part = Part(places, grad_output.reshape(planes, 1, outputs, 1).contiguous())
    sums = result.view(planes, 1, prod(self.shape[-dims:]), 1)
    accumulate(sums, lambda: [part], pieces, include=False)
    if keep_format and not self.is_contiguous():
        memory_format = suggest_memory_format(self)
        return torch.empty_like(result, memory_format=memory_format).copy_(result)
    return result


def _can_choose(grad_output: Tensor, self: Tensor, indices: Tensor, dims: int) -> bool:
    """Return whether an output's gradient fits the input of a pooling, but for its sizes."""
    return (
        self.dim() in (dims + 1, dims + 2)
        and grad_output.shape[:-dims] == self.shape[:-dims]
        and grad_output.dim() == self.dim()
        and grad_output.dtype == self.dtype
        and self.is_floating_point()
        and min(*self.shape[1:], *grad_output.shape[-dims:]) > 0
        and indices.shape == grad_output.shape
        and indices.dtype == torch.int64
    )


def _has_shape(grad_output: Tensor, self: Tensor, arguments: tuple[Any, ...]) -> bool:
    """Return whether a ``max_pool3d`` with these arguments has an output of this shape."""
    try:
        pooled = torch.max_pool3d(self.new_empty(self.shape, device="meta"), *arguments)
    except (RuntimeError, IndexError):
        return False
    return pooled.shape == grad_output.shape
