"""Gathering plain values from all ranks on rank 0, which writes checkpoints."""

from typing import TYPE_CHECKING, Any

import torch

from lightning_d9m.lightning.ranks.trainer_ranks import ranks_of
from lightning_d9m.recording.plain_data import decode_plain, encode_plain

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

# Bytes of each rank that are gathered at a time: the parts of all ranks are on the device at once.
# The first part holds the whole state in almost every training, so that ranks wait only once.
_FIRST = 64 * 2**10
_CHUNK = 4 * 2**20
_SIZE_BYTES = 8  # the data begins with its size


def gather_values(trainer: "Trainer", own: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the plain values of all ranks on rank 0; any other rank gets only its own.

    Raises:
        RanksDisagreeError: On rank 0, if another rank sent anything but plain values.
    """
    if ranks_of(trainer).gather is None:
        return [own]
    strategy = trainer.strategy
    payload = encode_plain(own)
    data = len(payload).to_bytes(_SIZE_BYTES, "little") + payload
    rows: list[list[bytes]] = [[] for _ in range(trainer.world_size)]
    at, length, longest = 0, _FIRST, _SIZE_BYTES
    while at < longest:
        part = torch.frombuffer(
            bytearray(data[at : at + length].ljust(length, b"\0")), dtype=torch.uint8
        )
        gathered = strategy.all_gather(part.to(strategy.root_device))
        parts = gathered.reshape(trainer.world_size, -1)
        if at == 0:
            sizes = parts[:, :_SIZE_BYTES].cpu().numpy()
            longest = _SIZE_BYTES + max(_read_size(size.tobytes()) for size in sizes)
        if trainer.is_global_zero:
            for row, chunk in zip(rows, parts.cpu().numpy(), strict=True):
                row.append(chunk.tobytes())
        at, length = at + length, _CHUNK
    if not trainer.is_global_zero:
        return [own]
    return [
        own if rank == trainer.global_rank else _decode(b"".join(row))
        for rank, row in enumerate(rows)
    ]


def _decode(row: bytes) -> dict[str, Any]:
    state: dict[str, Any] = decode_plain(row[_SIZE_BYTES : _SIZE_BYTES + _read_size(row)])
    return state


def _read_size(row: bytes) -> int:
    return int.from_bytes(row[:_SIZE_BYTES], "little")
