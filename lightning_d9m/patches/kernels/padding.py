"""Gradients of padding by reflection and by replication.

torch's CUDA kernels start one thread per output and add with atomics, because several outputs
copy one input. Here each input reads the gradients of its copies in order.
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


def build_padding_table(
    input_size: int, output_size: int, left: int, reflected: bool
) -> GatherTable:
    """Return the gather table of padding along one dimension, by reflection or with the edges."""
    outputs = torch.arange(output_size, dtype=torch.int64, device="cpu")
    inputs, last = outputs - left, input_size - 1
    inputs = last - (last - inputs.abs()).abs() if reflected else inputs.clamp(0, last)
    return build_gather_table(inputs, outputs, input_size)


def _backward(
    original: Original, grad_output: Tensor, self: Tensor, padding: Sequence[int], *, kind: str
) -> Tensor:
    """Return the gradient of padding, ``"reflected"`` or ``"replicated"``, by its input."""
    sides = _list_sides(padding)
    sizes = self.shape[-len(sides) :]
    reflected = kind == "reflected"
    if not _fits(grad_output, self, sides) or any(
        reflected and max(side) >= size for size, side in zip(sizes, sides, strict=True)
    ):
        raise_as_original(original, grad_output, self, padding)
    reference = partial(_gather_copies, reflected=reflected)
    return run_kernel(f"padding:{kind}", reference, grad_output, self, sides)


def _gather_copies(
    grad_output: Tensor, self: Tensor, sides: Sequence[tuple[int, int]], *, reflected: bool
) -> Tensor:
    dims = len(sides)
    tables = [
        cached_on_device(self.device, build_padding_table, *sizes, left, reflected)
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


reflection_pad_backward = partial(_backward, kind="reflected")
replication_pad_backward = partial(_backward, kind="replicated")
