"""Gradients of max pooling: each input reads the windows that chose it.

torch's CUDA kernels start one thread per output and add to the chosen input with atomics. A
window chooses one input; where windows overlap, several may choose the same.
"""

from collections.abc import Sequence
from functools import partial
from itertools import product
from math import prod

import torch
from torch import Tensor

from lightning_d9m.patches.primitives.fallback import Original, raise_as_original
from lightning_d9m.patches.primitives.gather_tables import cached_on_device, cast_like
from lightning_d9m.patches.primitives.pooling_windows import (
    Window,
    WindowExtent,
    build_adaptive_extent,
    build_strided_extent,
    count_outputs,
    read_windows,
)
from lightning_d9m.patches.primitives.segment_reduce import accumulation_dtype, sum_segments
from lightning_d9m.patches.triton.launch import run_kernel

_NO_INPUT = -2


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
    windows = read_windows(dims, kernel_size, stride, padding, dilation)
    sizes = self.shape[-dims:]
    if (
        not _can_choose(grad_output, self, indices, dims)
        or any(min(w.size, w.stride, w.dilation) < 1 or 2 * w.padding > w.size for w in windows)
        or list(grad_output.shape[-dims:])
        != [count_outputs(*side, ceil_mode=ceil_mode) for side in zip(sizes, windows, strict=True)]
    ):
        raise_as_original(
            original,
            grad_output,
            self,
            kernel_size,
            stride,
            padding,
            dilation,
            ceil_mode,
            indices,
        )
    return run_kernel("max_pool:strided", _gather_strided, grad_output, self, indices, windows)


def _adaptive_backward(
    original: Original, grad_output: Tensor, self: Tensor, indices: Tensor, *, dims: int
) -> Tensor:
    """Return the gradient of an adaptive max pooling with respect to its input."""
    if not _can_choose(grad_output, self, indices, dims):
        raise_as_original(original, grad_output, self, indices)
    return run_kernel("max_pool:adaptive", _gather_adaptive, grad_output, self, indices, dims)


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
    return run_kernel("max_pool:fractional", _sort_by_chosen, grad_output, self, indices, sizes)


adaptive_max_pool2d_backward = partial(_adaptive_backward, dims=2)
adaptive_max_pool3d_backward = partial(_adaptive_backward, dims=3)
fractional_max_pool2d_backward = partial(_fractional_backward, dims=2)
fractional_max_pool3d_backward = partial(_fractional_backward, dims=3)


def _gather_strided(
    grad_output: Tensor, self: Tensor, indices: Tensor, windows: Sequence[Window]
) -> Tensor:
    dims = len(windows)
    extents = [
        cached_on_device(self.device, build_strided_extent, *side)
        for side in zip(self.shape[-dims:], grad_output.shape[-dims:], windows, strict=True)
    ]
    return cast_like(_gather_chosen(grad_output, indices, extents), self, keep_format=True)


def _gather_adaptive(grad_output: Tensor, self: Tensor, indices: Tensor, dims: int) -> Tensor:
    sides = zip(self.shape[-dims:], grad_output.shape[-dims:], strict=True)
    extents = [cached_on_device(self.device, build_adaptive_extent, *side) for side in sides]
    chosen = _gather_chosen(grad_output, indices, extents)
    return cast_like(chosen, self, keep_format=dims == 2)  # noqa: PLR2004 - as torch's kernels


def _sort_by_chosen(
    grad_output: Tensor, self: Tensor, indices: Tensor, kernel_size: Sequence[int]
) -> Tensor:
    """Return the gradient of a fractional max pooling.

    The windows start at random, differently in each plane, so no fixed list contains the windows of
    an input: the outputs are sorted by the input that they chose.
    """
    dims = len(kernel_size)
    planes, inputs = prod(self.shape[:-dims]), prod(self.shape[-dims:])
    first = torch.arange(planes, dtype=torch.int64, device=self.device)[:, None] * inputs
    keys = (indices.flatten(-dims).flatten(0, -2) + first).flatten()
    sums = sum_segments(keys, grad_output.reshape(-1), planes * inputs)
    return cast_like(sums.view(self.shape), self, keep_format=False)


def _gather_chosen(grad_output: Tensor, indices: Tensor, extents: list[WindowExtent]) -> Tensor:
    """Add, for each input, the gradients of the windows whose index names it.

    Args:
        grad_output: Of shape ``[..., *outputs]``.
        indices: For each output the flat position of the chosen input in its plane.
        extents: For each dimension the windows that contain an input.
    """
    dims = len(extents)
    planes = prod(grad_output.shape[:-dims])
    outputs = prod(grad_output.shape[-dims:])
    gradients, chosen = (part.reshape(planes, outputs) for part in (grad_output, indices))
    sizes = [extent.outputs.shape[1] for extent in extents]
    device = grad_output.device
    inputs = torch.arange(prod(sizes), dtype=torch.int64, device=device).view(sizes)
    dtype = accumulation_dtype(grad_output.dtype)
    total = torch.zeros((planes, prod(sizes)), dtype=dtype, device=device)
    # The windows that contain an input are visited in ascending order, which is the order in which
    # one thread that goes through all outputs would add them.
    for ranks in product(*(range(len(extent.outputs)) for extent in extents)):
        read, expected = torch.zeros_like(inputs), inputs
        for position, (extent, rank) in enumerate(zip(extents, ranks, strict=True)):
            side = [-1] + [1] * (dims - 1 - position)
            window = extent.outputs[rank].view(side)
            read = read * grad_output.shape[position - dims] + window.clamp(min=0)
            expected = torch.where(window >= 0, expected, _NO_INPUT)
        places = read.flatten()
        hit = chosen.index_select(1, places) == expected.flatten()
        total += torch.where(hit, gradients.index_select(1, places), 0)
    return total.view(*grad_output.shape[:-dims], *sizes)


def _can_choose(grad_output: Tensor, self: Tensor, indices: Tensor, dims: int) -> bool:
    return (
        self.dim() in (dims + 1, dims + 2)
        and grad_output.dim() == self.dim()
        and grad_output.shape[:-dims] == self.shape[:-dims]
        and indices.shape == grad_output.shape
        and indices.dtype == torch.int64
        and grad_output.dtype == self.dtype
        and self.is_floating_point()
        and min(*self.shape[-dims - 1 :], *grad_output.shape[-dims:]) > 0
    )
