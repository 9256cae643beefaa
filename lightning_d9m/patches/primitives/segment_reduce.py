"""Reductions over elements that share a key, always in the order in which they came.

A stable sort by key puts the elements of one output side by side without changing their order;
each run is then reduced by one reader. No two threads ever meet on one output, so there is no
race whose winner could change the rounding. Nothing is read back to the host.
"""

import math
from collections.abc import Callable
from typing import Literal, TypeAlias

import torch
from torch import Tensor

Reduction: TypeAlias = Literal["sum", "prod", "max", "min"]

_REDUCTIONS: dict[Reduction, tuple[Callable[[Tensor, Tensor], Tensor], float]] = {
    "sum": (torch.add, 0),
    "prod": (torch.mul, 1),
    "max": (torch.maximum, -math.inf),
    "min": (torch.minimum, math.inf),
}
_INT32_LIMIT = 2**31 - 1
_MODE_SUM = 0
_LONG = 64  # elements of a run, on average, that are worth a block of threads


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype to add in: float32 for half and bfloat16, else the dtype itself."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def sum_segments(keys: Tensor, values: Tensor, count: int) -> Tensor:
    """Add the values that share a key; see :func:`reduce_segments`."""
    return reduce_segments(keys, values, count, "sum")


def reduce_segments(keys: Tensor, values: Tensor, count: int, reduce: Reduction) -> Tensor:
    """Reduce the values that share a key.

    Args:
        keys: Integers of shape ``[m]``. A key outside ``0 .. count - 1`` is left out.
        values: Floating point or integers, of shape ``[m]`` or ``[m, features]``.
        count: Number of outputs.
        reduce: What becomes of the values of one key.

    Returns:
        Of shape ``[count]`` or ``[count, features]``. Where a key does not occur: 0 of ``"sum"``, 1
        of ``"prod"``; of ``"max"`` and ``"min"`` no value that means anything. Half and bfloat16
        are reduced in float32, in which they are also returned.
    """
    order, offsets = _group(keys, count)
    rows = values.index_select(0, order).to(accumulation_dtype(values.dtype))
    fold, initial = _REDUCTIONS[reduce]
    if rows.is_floating_point():
        return _reduce_runs(rows, offsets, reduce, initial)
    # torch.segment_reduce takes floating point only. Integers may be reduced in any order, so runs
    # are folded in halves: after step k each element holds the reduction of 2**k of its run.
    empty = rows.new_full((count, *rows.shape[1:]), int(reduce == "prod"))
    if not rows.numel():
        return empty
    wide = (-1, *[1] * (rows.dim() - 1))
    sorted_keys = keys.index_select(0, order).view(wide)
    step = 1
    while step < len(rows):
        same = sorted_keys[step:] == sorted_keys[:-step]
        folded = torch.where(same, fold(rows[step:], rows[:-step]), rows[step:])
        rows = torch.cat([rows[:step], folded])
        step *= 2
    last = (offsets[1:] - 1).clamp_(min=0)
    occupied = (offsets[1:] > offsets[:-1]).view(wide)
    return torch.where(occupied, rows.index_select(0, last), empty)


def sum_weighted_rows(keys: Tensor, weights: Tensor, rows: Tensor, count: int) -> Tensor:
    """Add each row, times its weights, to the outputs that its keys name.

    Args:
        keys: Integers of shape ``[m, k]``; ``count`` stands for no output.
        weights: One for each key, of the rows' dtype.
        rows: Of shape ``[m, features]``, float32 or float64.
        count: Number of outputs.

    Returns:
        Sums of shape ``[count, features]``, each in the order of the rows and of their keys.
    """
    order, offsets = _group(keys.flatten(), count)
    reads = torch.div(order, keys.shape[1], rounding_mode="floor")
    sums = sum_bags(rows, reads, offsets, weights.flatten().index_select(0, order))
    return sums[:-1]  # the last bag holds what stands for no output


def sum_bags(rows: Tensor, reads: Tensor, offsets: Tensor, weights: Tensor | None) -> Tensor:
    """Add, for each output, the rows that it reads, from first to last.

    This is ``embedding_bag`` in mode sum: each output has one reader.

    Args:
        rows: Of shape ``[rows, features]``.
        reads: The rows that output 0 reads, that output 1 reads, ...; of shape ``[entries]``.
        offsets: Where each output's reads start; of shape ``[outputs]``.
        weights: The factor of each entry, of the rows' dtype, or None where all are 1.
    """
    forward = torch.ops.aten._embedding_bag_forward_only  # noqa: SLF001 - below autograd, as this is
    sums: Tensor = forward(rows, reads, offsets, False, _MODE_SUM, False, weights)[0]  # noqa: FBT003 - an argument of torch's
    return sums


def find_last(keys: Tensor) -> Tensor:
    """Say for each element which is the last one with the same key.

    Args:
        keys: Integers of shape ``[m]``.

    Returns:
        Positions of shape ``[m]``, int64.
    """
    sorted_keys, order = torch.sort(keys, stable=True)
    last = torch.searchsorted(sorted_keys, keys, right=True) - 1
    return order.index_select(0, last)


def _group(keys: Tensor, count: int) -> tuple[Tensor, Tensor]:
    if max(count, keys.numel()) < _INT32_LIMIT:
        keys = keys.to(torch.int32)  # half as many bits to sort by
    sorted_keys, order = torch.sort(keys, stable=True)
    bounds = torch.arange(count + 1, dtype=keys.dtype, device=keys.device)
    return order, torch.searchsorted(sorted_keys, bounds)


def _reduce_runs(rows: Tensor, offsets: Tensor, reduce: str, initial: float) -> Tensor:
    if not rows.numel():
        return rows.new_full((offsets.numel() - 1, *rows.shape[1:]), initial)
    if rows.dim() == 1 and rows.numel() < _LONG * offsets.numel():
        # On CUDA vectors get a block of threads for each run, rows a thread for each run and
        # feature. Only sizes decide, so that the choice is always the same.
        return _reduce_runs(rows.unsqueeze(1), offsets, reduce, initial).squeeze(1)
    # unsafe: the offsets are ours; checking them would wait for the device.
    return torch.segment_reduce(rows, reduce, offsets=offsets, initial=initial, unsafe=True)
