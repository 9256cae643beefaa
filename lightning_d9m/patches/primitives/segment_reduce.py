"""Reductions over elements that share a key, in the order of the elements.

A stable sort by key makes the elements of each key adjacent without changing their order; one
thread, or one fixed tree of threads, then reduces each run. No two threads write to one output, so
no race changes the rounding. Nothing is read back to the host.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

_INT32_LIMIT = 2**31 - 1
_LONG = 64  # average number of elements per run from which a block of threads per run pays


@dataclass(frozen=True)
class Update:
    """The result of a kernel that writes into a tensor.

    Attributes:
        write: Writes into the tensor: ``self`` of an in-place op, else a copy of it.
    """

    write: Callable[[Tensor], object]


class KeyRuns(NamedTuple):
    """Elements sorted by key, so that the elements of each key form one run.

    Attributes:
        order: Position of each sorted element; shape ``[m]``.
        run: Number of the run of each sorted element; shape ``[m]``.
        offsets: Start of each run, then m; shape ``[runs + 1]``.
    """

    order: Tensor
    run: Tensor
    offsets: Tensor


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype to add in: float32 for half and bfloat16, else the dtype itself."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def multiply_into(
    target: Tensor,
    indices: tuple[Tensor, ...],
    keys: Tensor,
    count: int,
    values: Tensor,
    *,
    include_self: bool = True,
) -> None:
    """Multiply values into the places of a tensor that indices name, from first to last.

    Time and memory grow with the number of values, not with the size of the target.

    Args:
        target: The tensor to write into.
        indices: For each of the first dimensions of the target an index of shape ``[m]``.
        keys: The same places as integers in ``0 .. count - 1``; shape ``[m]``, from 1 element.
        count: Number of places.
        values: Of shape ``[m, *rest]``, where ``rest`` are the other dimensions of the target.
        include_self: Whether the target's value is the first factor.
    """
    runs = _sort_into_runs(keys, count)
    places = tuple(index.index_select(0, runs.order) for index in indices)
    rows = values.index_select(0, runs.order).to(accumulation_dtype(values.dtype))
    wide = (-1, *[1] * (rows.dim() - 1))
    if include_self:
        first = torch.cat([torch.ones_like(runs.run[:1]), runs.run.diff()]) != 0
        rows = torch.where(first.view(wide), target[places].to(rows.dtype) * rows, rows)
    reduced = _multiply_runs(rows, runs)
    # The elements of a run write equal values, so the order of the writes has no effect.
    target.index_put_(places, reduced.index_select(0, runs.run).to(target.dtype))


def find_last(keys: Tensor, count: int) -> Tensor:
    """Return for each element the position of the last element with the same key.

    Args:
        keys: Integers of shape ``[m]``.
        count: Number of keys.

    Returns:
        Positions of shape ``[m]``, int64.
    """
    sorted_keys, order = _sort(keys, count)
    last = torch.searchsorted(sorted_keys, keys.to(sorted_keys.dtype), right=True) - 1
    return order.index_select(0, last)


def _sort(keys: Tensor, count: int) -> tuple[Tensor, Tensor]:
    if max(count, keys.numel()) < _INT32_LIMIT:
        keys = keys.to(torch.int32)  # a radix sort by half as many bits
    return torch.sort(keys, stable=True)


def _find_offsets(sorted_keys: Tensor, count: int) -> Tensor:
    bounds = torch.arange(count + 1, dtype=sorted_keys.dtype, device=sorted_keys.device)
    return torch.searchsorted(sorted_keys, bounds)


def _sort_into_runs(keys: Tensor, count: int) -> KeyRuns:
    sorted_keys, order = _sort(keys, count)
    if count <= keys.numel():
        return KeyRuns(order, sorted_keys, _find_offsets(sorted_keys, count))
    # Fewer elements than keys: number the keys that occur. Runs at the end stay empty.
    changes = (sorted_keys.diff() != 0).cumsum(0)
    run = torch.cat([changes.new_zeros(1), changes])
    return KeyRuns(order, run, _find_offsets(run, keys.numel()))


def _multiply_runs(rows: Tensor, runs: KeyRuns) -> Tensor:
    """Multiply sorted rows of shape ``[m, ...]``: one row for each run, 1 for an empty one."""
    offsets = runs.offsets
    if rows.is_floating_point():
        return _reduce_runs(rows, offsets, "prod", 1)
    # torch.segment_reduce takes floating point only. Integers may be multiplied in any order: after
    # step k of this loop each element holds the product of 2**k elements of its run.
    empty = rows.new_ones((offsets.numel() - 1, *rows.shape[1:]))
    wide = (-1, *[1] * (rows.dim() - 1))
    keys = runs.run.view(wide)
    step = 1
    while step < len(rows):
        same = keys[step:] == keys[:-step]
        folded = torch.where(same, rows[step:] * rows[:-step], rows[step:])
        rows = torch.cat([rows[:step], folded])
        step *= 2
    last = (offsets[1:] - 1).clamp_(min=0)
    occupied = (offsets[1:] > offsets[:-1]).view(wide)
    return torch.where(occupied, rows.index_select(0, last), empty)


def _reduce_runs(rows: Tensor, offsets: Tensor, reduce: str, initial: float) -> Tensor:
    if not rows.numel():
        return rows.new_full((offsets.numel() - 1, *rows.shape[1:]), initial)
    if rows.dim() == 1 and rows.numel() < _LONG * offsets.numel():
        # On CUDA vectors get a block of threads for each run, rows a thread for each run and
        # feature. The choice depends on the sizes only, so it is always the same.
        return _reduce_runs(rows.unsqueeze(1), offsets, reduce, initial).squeeze(1)
    # unsafe: the offsets are known to be valid; checking them would wait for the device.
    return torch.segment_reduce(rows, reduce, offsets=offsets, initial=initial, unsafe=True)
