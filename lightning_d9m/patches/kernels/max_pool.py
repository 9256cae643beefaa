"""Gradients of max pooling: each input reads the windows that chose it.

torch's CUDA kernels start one thread per output and add to the chosen input with atomics. A
window chooses one input; where windows overlap, several may choose the same.
"""

from collections.abc import Sequence
from functools import partial
from math import prod

import torch
from torch import Tensor

from lightning_d9m.patches.primitives.fallback import Original, raise_as_original
from lightning_d9m.patches.primitives.gather_tables import cast_like
from lightning_d9m.patches.primitives.pooling_windows import count_outputs, is_pooled, read_windows
from lightning_d9m.patches.primitives.segment_reduce import sum_segments
from lightning_d9m.patches.triton.launch import run_kernel


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
    windows = read_windows(dims, kernel_size, stride, padding, dilation)
    sizes = self.shape[-dims:]
    if (
        not _can_choose(grad_output, self, indices, dims)
        or not self.shape[-dims - 1]
        or any(min(w.size, w.stride, w.dilation) < 1 or 2 * w.padding > w.size for w in windows)
        or list(grad_output.shape[-dims:])
        != [count_outputs(*side, ceil_mode=ceil_mode) for side in zip(sizes, windows, strict=True)]
    ):
        raise_as_original(original, grad_output, self, *shape, indices)
    reference = partial(_add_chosen, dims=dims, keep_format=True)
    return run_kernel("max_pool:strided", reference, grad_output, self, indices, windows)


def _adaptive_backward(
    original: Original, grad_output: Tensor, self: Tensor, indices: Tensor, *, dims: int
) -> Tensor:
    """Return the gradient of an adaptive max pooling with respect to its input."""
    if not _can_choose(grad_output, self, indices, dims):
        raise_as_original(original, grad_output, self, indices)
    reference = partial(_add_chosen, dims=dims, keep_format=dims == 2)  # noqa: PLR2004 - as torch's kernels
    return run_kernel("max_pool:adaptive", reference, grad_output, self, indices, dims)


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
    (*sizes,) = (window.size for window in read_windows(dims, kernel_size, (), (0,)))
    reference = partial(_add_chosen, dims=dims, keep_format=False)
    return run_kernel("max_pool:fractional", reference, grad_output, self, indices, sizes)


adaptive_max_pool2d_backward = partial(_adaptive_backward, dims=2)
adaptive_max_pool3d_backward = partial(_adaptive_backward, dims=3)
fractional_max_pool2d_backward = partial(_fractional_backward, dims=2)
fractional_max_pool3d_backward = partial(_fractional_backward, dims=3)


def _add_chosen(
    grad_output: Tensor,
    self: Tensor,
    indices: Tensor,
    _windows: object,
    *,
    dims: int,
    keep_format: bool,
) -> Tensor:
    """Add, for each input, the gradients of the windows whose index names it, in ascending order.

    The outputs are sorted by the input that they chose, in every plane.
    """
    planes, inputs = prod(self.shape[:-dims]), prod(self.shape[-dims:])
    first = torch.arange(planes, dtype=torch.int64, device=self.device)[:, None] * inputs
    places = indices.flatten(-dims).flatten(0, -2)
    keys = torch.where((places >= 0) & (places < inputs), places + first, -1)
    # As rows of one feature, which one thread adds from first to last.
    sums = sum_segments(keys.flatten(), grad_output.reshape(-1, 1), planes * inputs)
    return cast_like(sums.view(self.shape), self, keep_format=keep_format)


def _can_choose(grad_output: Tensor, self: Tensor, indices: Tensor, dims: int) -> bool:
    return (
        is_pooled(grad_output, self, dims)
        and indices.shape == grad_output.shape
        and indices.dtype == torch.int64
    )
