# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: ANN001, ANN201, N803, N806, PLR0913, PLR0917, SIM300 - Triton's compiler reads these functions
"""Maxima and minima by index, of integers whose order is that of the numbers.

``patches/kernels/index_reduce.py`` has the definition. Three launches: the outputs get the integers
of their own values, the values raise them by atomic maxima, and the last launch writes the numbers
of those that have changed.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_d9m.patches.triton.exact_sum import locate_terms
from lightning_d9m.patches.triton.geometry import find_block
from lightning_d9m.patches.triton.launch import allocate, launch_blocks, needs_int64


@triton.jit
def order(value, GREATEST: tl.constexpr, INTEGER: tl.constexpr):
    """Return integers in the order of the numbers, or the reverse; a NaN is the greatest."""
    if INTEGER == tl.int64:
        number = value.to(tl.float64)
        bits = number.to(tl.int64, bitcast=True)
        largest = tl.full([], 0x7FFFFFFFFFFFFFFF, tl.int64)
    else:
        number = value.to(tl.float32)
        bits = number.to(tl.int32, bitcast=True)
        largest = tl.full([], 0x7FFFFFFF, tl.int32)
    ordered = tl.where(bits < 0, bits ^ largest, bits)
    if not GREATEST:
        ordered = ~ordered
    return tl.where(number != number, largest, ordered)  # noqa: PLR0124 - a NaN


@triton.jit
def restore(ordered, GREATEST: tl.constexpr, INTEGER: tl.constexpr):
    """Return the numbers of ``order``, in float32 or float64."""
    if INTEGER == tl.int64:
        largest = tl.full([], 0x7FFFFFFFFFFFFFFF, tl.int64)
    else:
        largest = tl.full([], 0x7FFFFFFF, tl.int32)
    plain = ordered
    if not GREATEST:
        plain = ~ordered
    bits = tl.where(plain < 0, plain ^ largest, plain)
    if INTEGER == tl.int64:
        value = bits.to(tl.float64, bitcast=True)
    else:
        value = bits.to(tl.float32, bitcast=True)
    return tl.where(ordered == largest, float("nan"), value)


@triton.jit
def find_start(
    rows,
    chosen,
    offsets,
    exists,
    INCLUDE: tl.constexpr,
    GREATEST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return the integers of the outputs' own values, or one that is less than all."""
    INTEGER: tl.constexpr = chosen.dtype.element_ty
    start = tl.full([BLOCK], -1 << (INTEGER.primitive_bitwidth - 1), INTEGER)
    if INCLUDE:
        start = order(tl.load(rows + offsets, mask=exists, other=0.0), GREATEST, INTEGER)
    return start


@triton.jit
def begin(
    rows,
    chosen,
    elements,
    INCLUDE: tl.constexpr,
    GREATEST: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Write what ``find_start`` returns."""
    offsets, exists = find_block(elements, BLOCK, WIDE)
    start = find_start(rows, chosen, offsets, exists, INCLUDE, GREATEST, BLOCK)
    tl.store(chosen + offsets, start, mask=exists)


@triton.jit
def raise_outputs(
    values,
    index,
    chosen,
    count,
    terms,
    inner,
    elements,
    GREATEST: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Raise the integers of outputs to those of their values."""
    element, place, mask = locate_terms(index, count, terms, inner, elements, BLOCK, False, WIDE)  # noqa: FBT003 - a constant of the kernel
    INTEGER: tl.constexpr = chosen.dtype.element_ty
    ordered = order(tl.load(values + element, mask=mask, other=0.0), GREATEST, INTEGER)
    # They only grow: what was read, perhaps too early, spares most atomics and changes no result.
    known = tl.load(chosen + place, mask=mask, other=0)
    tl.atomic_max(chosen + place, ordered, mask=mask & (ordered > known), sem="relaxed")


@triton.jit
def finish(
    rows,
    chosen,
    elements,
    INCLUDE: tl.constexpr,
    GREATEST: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Write the numbers of the outputs that differ from what ``begin`` wrote."""
    offsets, exists = find_block(elements, BLOCK, WIDE)
    top = tl.load(chosen + offsets, mask=exists, other=0)
    kept = top == find_start(rows, chosen, offsets, exists, INCLUDE, GREATEST, BLOCK)
    number = restore(top, GREATEST, chosen.dtype.element_ty).to(rows.dtype.element_ty)
    tl.store(rows + offsets, number, mask=exists & ~kept)


def choose(
    rows: Tensor, keys: Tensor, values: Tensor, *, greatest: bool, include_self: bool
) -> None:
    """Replace each row that gets a value by the greatest or the least one.

    Rows are contiguous and of shape ``[count, ...]``, keys of ``[m]``, values of ``[m, ...]``.
    """
    count, terms = len(rows), len(keys)
    dtype = torch.int64 if rows.dtype == torch.float64 else torch.int32
    chosen = allocate((rows.numel(),), torch.empty(0, dtype=dtype, device=rows.device))
    values, keys = values.contiguous(), keys.contiguous()
    constants = {"GREATEST": greatest, "WIDE": needs_int64(rows, values)}
    launch_blocks(begin, rows, rows, chosen, INCLUDE=include_self, **constants)
    shape = (count, terms, rows.numel() // count)
    launch_blocks(raise_outputs, values, values, keys, chosen, *shape, **constants)
    launch_blocks(finish, rows, rows, chosen, INCLUDE=include_self, **constants)
