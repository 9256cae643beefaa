"""Numbers and tensors of all logical ranks, in their order, on every process."""

import json
import math
from array import array
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, distributed

from lightning_d9m.errors import RanksDisagreeError, SettingError
from lightning_d9m.logical_ranks.blocks import Blocks

# All processes send so many bytes at first, which is enough for logged values; then they know how
# many follow.
_FIRST_BYTES = 2**12
_SIZE_BYTES = 8


def exact_sum(values: Sequence[float], group: Any = None) -> float:
    """Return the correctly rounded sum of the values of all processes, on every process.

    It is that of `math.fsum`, so neither the order of the values nor the number of processes that
    hold them changes a bit. Each process may pass any number of values.

    Args:
        values: The values of this process.
        group: The process group; None is torch's default group, or this process alone.
    """
    parts = gather_bytes(array("d", values).tobytes(), group)
    return sum_exactly([value for part in parts for value in array("d", part)])


def sum_exactly(values: Sequence[float]) -> float:
    """Return the correctly rounded sum; with infinities and NaNs, what IEEE 754 says.

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


def gather_by_logical_rank(
    values: Sequence[Tensor], blocks: Blocks, group: Any = None
) -> list[Tensor]:
    """Return the tensors of all logical ranks, in their order, on every process.

    Args:
        values: One tensor for each logical rank of this process; shapes and dtypes may differ.
        blocks: The logical ranks of all processes.
        group: The process group; None is torch's default group, or this process alone.

    Returns:
        The tensors, on the device of ``values``; those of this process are copies, too.

    Raises:
        SettingError: There is not one tensor for each logical rank.
        RanksDisagreeError: Another process sent something else.
    """
    parts = gather_bytes(_encode(values), group)
    gathered = [tensor for part in parts for tensor in _decode(part)]
    if len(gathered) != blocks.logical_ranks:
        raise SettingError(
            f"{len(gathered)} tensors came in for {blocks.logical_ranks} logical ranks: pass one "
            "for each logical rank of this process."
        )
    return [tensor.to(values[0].device) for tensor in gathered]


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
    # Lightning validates in inference mode, whose tensors may not be written to elsewhere.
    with torch.inference_mode(mode=False):
        sent = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        if "nccl" in group.name().lower():
            sent = sent.cuda()
        gathered = sent.new_empty(group.size() * len(sent))
        group.allgather([list(gathered.chunk(group.size()))], [sent]).wait()
        return [part.numpy().tobytes() for part in gathered.cpu().chunk(group.size())]


def _encode(values: Sequence[Tensor]) -> bytes:
    described, parts = [], []
    for value in values:
        if value.layout is not torch.strided or value.is_quantized:
            raise SettingError(
                f"A tensor with layout {value.layout} and dtype {value.dtype} cannot be gathered: "
                "logical ranks exchange dense tensors. Gather its dense parts."
            )
        described.append([str(value.dtype).removeprefix("torch."), list(value.shape)])
        plain = value.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
        parts.append(plain.view(torch.uint8).numpy().tobytes())
    header = json.dumps(described).encode()
    return b"".join([len(header).to_bytes(_SIZE_BYTES, "little"), header, *parts])


def _decode(data: bytes) -> list[Tensor]:
    try:
        at = _SIZE_BYTES + int.from_bytes(data[:_SIZE_BYTES], "little")
        tensors = []
        for name, shape in json.loads(data[_SIZE_BYTES:at]):
            dtype = getattr(torch, name)
            size = math.prod(shape) * dtype.itemsize
            raw = bytearray(data[at : at + size])
            flat = torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)
            tensors.append(flat.reshape(shape))
            at += size
    except (ValueError, TypeError, AttributeError, RuntimeError) as error:
        raise RanksDisagreeError(
            f"Another process sent {len(data)} bytes that are not tensors (they begin with "
            f"{data[:16]!r}): every process must run the same version of lightning_d9m.",
            intents=(),
        ) from error
    return tensors
