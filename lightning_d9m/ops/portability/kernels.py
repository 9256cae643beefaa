"""Computations with a fixed sequence of operations: by compiled kernels, or by their definitions.

Inputs are float32 or float64 tensors (``widen`` converts others); results have their dtype.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_d9m.ops.portability import definitions
from lightning_d9m.ops.portability.formulas import KERNELS
from lightning_d9m.ops.portability.library import find_kernel, run

_COLUMNS = 64  # that a kernel adds at a time: with 32 lanes they fit the first cache
_FEW = 16  # columns that are too few: most of a tile, or of the columns added at a time, is empty


def widen(values: Tensor) -> Tensor:
    """Return numbers of 16 bits as float32 numbers, and others unchanged."""
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values


def compute(name: str, **given: Tensor | Sequence[float] | None) -> tuple[Tensor, ...]:
    """Return the outputs of a kernel of rows.

    Args:
        name: One of ``formulas.KERNELS``.
        **given: Its inputs in their order; tensors of one dtype, those with all rows of one shape.
            An output that has the name of an input replaces it.
    """
    name = "_without_".join((name, *(key for key, one in given.items() if one is None)))
    formula = KERNELS[name]
    inputs: dict[str, Any] = {k: one for k, one in given.items() if one is not None}
    x = next(one for one in inputs.values() if isinstance(one, Tensor))
    kernel = find_kernel(name, x)
    replaced = (one for key, one in inputs.items() if key in formula.outputs)
    if kernel is None or not all(one.is_contiguous() and one.dtype == x.dtype for one in replaced):
        return tuple(definitions.compute(formula, inputs, x).values())
    count = x.shape[-1] if formula.in_rows else 1
    rows = x.numel() // max(count, 1)
    x = x.contiguous()
    out = tuple(
        torch.empty_like(x) if formula.outputs[one].each else x.new_empty(rows)
        for one in formula.fresh
    )
    members = list[Any]()
    for one in inputs.values():
        # A kernel sees pointers only; statistics of batches may have 16 bits.
        members += [one.to(x.dtype).contiguous()] if isinstance(one, Tensor) else map(float, one)
    periods = (len(inputs[one]) for one, place in formula.inputs.items() if place == "r % period")
    run(kernel, rows, 16 * x.numel(), count, next(periods, 1), *members, *out)
    return out


class Offsets(NamedTuple):
    """Places of the elements of matrices in memory: ``rows[i] + columns[j] + batch[b]``."""

    rows: Tensor
    columns: Tensor
    batch: Tensor


@lru_cache(maxsize=512)
def count_steps(count: int, step: int) -> Tensor:
    """Return the offsets of elements in even steps."""
    return (
        torch.arange(0, count * step, step, device="cpu")
        if step
        else torch.zeros(count, dtype=torch.int64, device="cpu")
    )


def multiply_at(left: Tensor, right: Tensor, out: Tensor, *places: Offsets) -> None:
    """Write products of matrices, whose elements are where offsets say, into a tensor.

    Args:
        left: Of shape ``[batch, rows, terms]`` by its offsets.
        right: Of shape ``[batch, terms, columns]``.
        out: Of shape ``[batch, rows, columns]``.
        *places: The offsets of the three tensors.
    """
    of_left, of_right, of_out = places
    rows, columns = of_left.rows.numel(), of_right.columns.numel()
    terms, batch = of_left.columns.numel(), of_left.batch.numel()
    if not rows * columns * batch:
        return
    if columns < min(_FEW, rows):
        places = tuple(Offsets(one.columns, one.rows, one.batch) for one in places)
        left, right, rows, columns = right, left, columns, rows
        of_right, of_left, of_out = places
    kernel = find_kernel("product", out)
    if kernel is None:
        factors = [_gather(*pair) for pair in ((left, of_left), (right, of_right))]
        result = definitions.multiply(*factors)
        _flatten(out, of_out)[_number(of_out).flatten()] = result.flatten()
        return
    tiles, cost = batch * -(-columns // kernel.width), batch * rows * columns * terms // 16
    given = (rows, columns, terms, left, right, out)
    run(kernel, tiles, cost, *given, *of_left, *of_right, *of_out)


def _number(places: Offsets) -> Tensor:
    return places.batch.view(-1, 1, 1) + places.rows.unsqueeze(1) + places.columns


def _flatten(values: Tensor, places: Offsets) -> Tensor:
    size = 1 + sum(int(one.max()) for one in places)
    return values.as_strided((size,), (1,))


def _gather(values: Tensor, places: Offsets) -> Tensor:
    return _flatten(values, places)[_number(places).to(values.device)]


def multiply(left: Tensor, right: Tensor) -> Tensor:
    """Return products of matrices: ``[batch, rows, terms]`` and ``[batch, terms, columns]``."""
    shape = (left.shape[0], left.shape[1], right.shape[2])
    if not left.shape[2]:
        return left.new_zeros(shape)
    out = left.new_empty(shape)
    places = (_place(one.shape, one.stride()) for one in (left, right, out))
    multiply_at(left, right, out, *places)
    return out


@lru_cache(maxsize=512)
def _place(shape: Sequence[int], strides: Sequence[int]) -> Offsets:
    batch, rows, columns = map(count_steps, shape, strides)
    return Offsets(rows, columns, batch)


def _merge(x: Tensor, dims: Sequence[int]) -> list[tuple[int, int]]:
    """Return sizes and strides of dimensions, those joined that follow each other in memory."""
    found: list[tuple[int, int]] = []
    for dim in dims:
        size, stride = x.shape[dim], x.stride(dim)
        if size == 1:
            continue
        if found and found[-1][1] == size * stride:
            size *= found.pop()[0]
        found.append((size, stride))
    return found


def add(x: Tensor, dims: Sequence[int], *, keepdim: bool = False) -> Tensor:
    """Return sums over dimensions.

    Args:
        x: The values.
        dims: None of them twice, none negative; the terms of a sum are in row-major order of them.
        keepdim: Whether they remain, with size 1.
    """
    kept, dims = [dim for dim in range(x.dim()) if dim not in dims], sorted(dims)
    shape = [1 if dim in dims else size for dim, size in enumerate(x.shape)]
    out = x.new_empty(shape if keepdim else [x.shape[dim] for dim in kept])
    if not x.numel():
        return out.zero_()
    kernel = find_kernel("row_sums", x)
    if kernel is None:
        rows = x.permute((*kept, *dims)).reshape(out.numel(), -1)
        return definitions.add_rows(rows).view(out.shape)
    results, terms = _merge(x, kept), _merge(x, dims)
    if results and len(results) <= 2 and len(terms) <= 1 and results[-1][1] == 1:
        columns = results[-1][0]
        matrices, step = results[0] if len(results) == 2 else (1, 0)
        count, row_step = terms[0] if terms else (1, 0)
        if columns >= _FEW or count == 1:
            items, wide = matrices * -(-columns // _COLUMNS), find_kernel("column_sums", x)
            assert wide
            run(wide, items, x.numel(), count, columns, step, row_step, x, out)
            return out
    if len(results) > 1 or len(terms) > 2:
        x, length = x.permute((*kept, *dims)).contiguous(), x.numel() // out.numel()
        results, terms = [(out.numel(), length)], [(length, 1)]
    (count, step) = results[0] if results else (1, 0)
    terms = [(1, 0)] * (2 - len(terms)) + terms
    run(kernel, count, x.numel(), step, *terms[0], *terms[1], x, out)
    return out


def draw(key: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return uniform numbers in [0, 1), float32 or float64, on the CPU."""
    out = torch.empty(shape, dtype=dtype, device="cpu")
    kernel = find_kernel("draw", out)
    if kernel is None:
        return definitions.draw(key, out.numel(), dtype, "cpu").view(out.shape)
    each = definitions.COUNTERS * (4 if dtype == torch.float32 else 2)
    run(kernel, -(-out.numel() // each), 16 * out.numel(), key, out.numel(), out)
    return out
