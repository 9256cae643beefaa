"""Exact sums of numbers, and the bytes of all processes on every process."""

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import torch
from torch import distributed
from torch.utils._python_dispatch import _disable_current_modes

# All processes send so many bytes at first, which is enough for logged values; then they know how
# many follow.
_FIRST_BYTES = 2**12
_SIZE_BYTES = 8


def sum_exactly(values: Sequence[float]) -> float:
    """Return the correctly rounded sum; with infinities and NaNs, what IEEE 754 says.

    It is that of `math.fsum`, so neither the order of the values nor the number of processes that
    hold them changes a bit.

    >>> sum_exactly([1e100, 1.0, -1e100])
    1.0
    """
    special = {value for value in values if not math.isfinite(value)}
    if special:
        return special.pop() if len(special) == 1 else math.nan
    try:
        return math.fsum(values)
    except OverflowError:  # a partial sum, perhaps not the sum
        total = sum(map(Fraction, values), Fraction(0))
        try:
            return float(total)
        except OverflowError:
            return math.inf if total > 0 else -math.inf


def gather_bytes(data: bytes, group: Any = None) -> list[bytes]:
    """Return the bytes of every process, in order of processes; the lengths may differ."""
    if group is None and distributed.is_available() and distributed.is_initialized():
        group = distributed.group.WORLD
    if group is None or group.size() == 1:
        return [data]
    sized = len(data).to_bytes(_SIZE_BYTES, "little") + data
    rows = _gather_equal(sized[:_FIRST_BYTES].ljust(_FIRST_BYTES, b"\0"), group)
    sizes = [int.from_bytes(row[:_SIZE_BYTES], "little") for row in rows]
    rest = _SIZE_BYTES + max(sizes) - _FIRST_BYTES
    if rest > 0:
        more = _gather_equal(sized[_FIRST_BYTES:].ljust(rest, b"\0"), group)
        rows = [row + tail for row, tail in zip(rows, more, strict=True)]
    return [row[_SIZE_BYTES : _SIZE_BYTES + size] for row, size in zip(rows, sizes, strict=True)]


def _gather_equal(data: bytes, group: Any) -> list[bytes]:
    # Lightning validates in inference mode, whose tensors may not be written to elsewhere. A mode
    # that probes operations would see bytes that no two runs have in common.
    with torch.inference_mode(mode=False), _disable_current_modes():
        sent = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        if "nccl" in group.name().lower():
            sent = sent.cuda()
        gathered = sent.new_empty(group.size() * len(sent))
        group.allgather([list(gathered.chunk(group.size()))], [sent]).wait()
        return [part.numpy().tobytes() for part in gathered.cpu().chunk(group.size())]
