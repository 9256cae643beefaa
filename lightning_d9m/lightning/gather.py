"""Gather values of all ranks on the rank that writes checkpoints."""

import io
from typing import TYPE_CHECKING, Any

import torch

from lightning_d9m.lightning.ranks import ranks_of

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

# Bytes per rank that one collective gathers, on the device. In almost every training the value fits
# into the first chunk, so that one collective is enough.
_FIRST = 64 * 2**10
_CHUNK = 4 * 2**20
_HEAD = 8  # bytes of the length field at the start


def gather_values(trainer: "Trainer", mine: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the plain values of all ranks; ranks other than 0 get only their own."""
    if ranks_of(trainer).gather is None:
        return [mine]
    strategy = trainer.strategy
    buffer = io.BytesIO()
    torch.save(mine, buffer)
    payload = buffer.getvalue()
    data = len(payload).to_bytes(_HEAD, "little") + payload
    rows: list[list[bytes]] = [[] for _ in range(trainer.world_size)]
    at, length, longest = 0, _FIRST, _HEAD
    while at < longest:
        part = torch.frombuffer(
            bytearray(data[at : at + length].ljust(length, b"\0")), dtype=torch.uint8
        )
        gathered = strategy.all_gather(part.to(strategy.root_device))
        parts = gathered.reshape(trainer.world_size, -1)
        if at == 0:
            heads = parts[:, :_HEAD].cpu().numpy()
            longest = _HEAD + max(_size_of(head.tobytes()) for head in heads)
        if trainer.is_global_zero:
            for row, own in zip(rows, parts.cpu().numpy(), strict=True):
                row.append(own.tobytes())
        at, length = at + length, _CHUNK
    if not trainer.is_global_zero:
        return [mine]
    return [
        mine if rank == trainer.global_rank else _decode(b"".join(row))
        for rank, row in enumerate(rows)
    ]


def _decode(row: bytes) -> dict[str, Any]:
    data = io.BytesIO(row[_HEAD : _HEAD + _size_of(row)])
    # The bytes come from a rank of this run, over the channel of the gradients. weights_only=True
    # would take more than twice as long.
    state: dict[str, Any] = torch.load(data, weights_only=False)
    return state


def _size_of(row: bytes) -> int:
    return int.from_bytes(row[:_HEAD], "little")
