"""Gradients of padding by reflection and by replication.

torch's CUDA kernels start one thread per output and add with atomics, because several outputs
copy one input. Here whole reflected strips are added back, one after the other, and replicated
edges read the gradients of their copies in order.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from lightning_d9m.patches.primitives.fallback import Original, raise_as_original
from lightning_d9m.patches.primitives.gather_tables import (
    GatherTable,
    build_gather_table,
    cached_on_device,
    cast_like,
    gather_through,
)
from lightning_d9m.patches.triton.launch import run_kernel


def build_replication_table(input_size: int, output_size: int, left: int) -> GatherTable:
    """Return the gather table of padding along one dimension with copies of the edge."""
    outputs = torch.arange(output_size, dtype=torch.int64, device="cpu")
    return build_gather_table((outputs - left).clamp(0, input_size - 1), outputs, input_size)


def _reflection_backward(
    original: Original, grad_output: Tensor, self: Tensor, padding: Sequence[int], *, dims: int
) -> Tensor:
    """Return the gradient of padding by reflection with respect to its input."""
    sides = _list_sides(padding)
    sizes = self.shape[-dims:]
    if not _fits(grad_output, self, sides) or any(
        max(side) >= size for size, side in zip(sizes, sides, strict=True)
    ):
        raise_as_original(original, grad_output, self, padding)
    return run_kernel("padding:reflected", _fold_reflected, grad_output, self, sides)


def _replication_backward(
    original: Original, grad_output: Tensor, self: Tensor, padding: Sequence[int]
) -> Tensor:
    """Return the gradient of padding by replication with respect to its input."""
    sides = _list_sides(padding)
    if not _fits(grad_output, self, sides):
        raise_as_original(original, grad_output, self, padding)
    return run_kernel("padding:replicated", _gather_replicated, grad_output, self, sides)


def _fold_reflected(grad_output: Tensor, self: Tensor, sides: Sequence[tuple[int, int]]) -> Tensor:
    return _fold(grad_output, self.shape[-len(sides) :], sides).contiguous()


def _gather_replicated(
    grad_output: Tensor, self: Tensor, sides: Sequence[tuple[int, int]]
) -> Tensor:
    dims = len(sides)
    tables = [
        cached_on_device(self.device, build_replication_table, *sizes, left)
        for *sizes, (left, _) in zip(
            self.shape[-dims:], grad_output.shape[-dims:], sides, strict=True
        )
    ]
    return cast_like(gather_through(grad_output, tables), self, keep_format=False)


def _list_sides(padding: Sequence[int]) -> list[tuple[int, int]]:
    """Return the paddings in the order of the dimensions; torch lists the last one first."""
    return [(padding[first], padding[first + 1]) for first in range(len(padding) - 2, -1, -2)]


def _fits(grad_output: Tensor, self: Tensor, sides: Sequence[tuple[int, int]]) -> bool:
    dims = len(sides)
    padded = [size + sum(side) for size, side in zip(self.shape[-dims:], sides, strict=True)]
    return (
        self.dim() in (dims + 1, dims + 2)
        and grad_output.dtype == self.dtype
        and (self.is_floating_point() or self.is_complex())
        and grad_output.shape == (*self.shape[:-dims], *padded)
        and min(*self.shape[-dims - 1 :], *padded) > 0
    )


def _fold(gradient: Tensor, sizes: Sequence[int], sides: Sequence[tuple[int, int]]) -> Tensor:
    """Fold the first of the given dimensions, and within each of its parts the others.

    Only the strips are read twice; the middle is copied once.
    """
    if not sizes:
        return gradient.clone(memory_format=torch.contiguous_format)
    dim = -len(sizes)
    size, (left, right) = sizes[0], sides[0]
    lead, trail = max(left, 0), max(right, 0)  # a negative padding cuts off instead
    middle = gradient.narrow(dim, lead, gradient.shape[dim] - lead - trail)
    result = _fold(middle, sizes[1:], sides[1:])
    if min(left, right) < 0:
        shape = list(result.shape)
        shape[dim] = size
        kept = result
        result = gradient.new_zeros(shape)
        result.narrow(dim, lead - left, kept.shape[dim]).copy_(kept)
    if lead:
        strip = _fold(gradient.narrow(dim, 0, lead), sizes[1:], sides[1:])
        result.narrow(dim, 1, lead).add_(strip.flip(dim))
    if trail:
        start = gradient.shape[dim] - trail
        strip = _fold(gradient.narrow(dim, start, trail), sizes[1:], sides[1:])
        result.narrow(dim, size - 1 - trail, trail).add_(strip.flip(dim))
    return result


reflection_pad1d_backward = partial(_reflection_backward, dims=1)
reflection_pad2d_backward = partial(_reflection_backward, dims=2)
reflection_pad3d_backward = partial(_reflection_backward, dims=3)
replication_pad1d_backward = _replication_backward
replication_pad2d_backward = _replication_backward
replication_pad3d_backward = _replication_backward
