"""Values of all ranks, brought to the one that writes checkpoints."""

import io
from typing import Any

import torch

from lightning_d9m.adapters.testimony import ranks_of

# How many bytes of each rank's are gathered at once: they lie on the device, those of all ranks.
_CHUNK = 4 * 2**20


def gather_values(trainer: Any, mine: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the plain values of all ranks; a rank that does not save gets its own only."""
    gather = ranks_of(trainer).gather
    if gather is None:
        return [mine]
    buffer = io.BytesIO()
    torch.save(mine, buffer)
    data = torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)
    sizes = [row[0] for row in gather([len(data)])]
    padded = torch.zeros(max(sizes), dtype=torch.uint8)
    padded[: len(data)] = data
    strategy = trainer.strategy
    gathered = []
    for part in padded.split(_CHUNK):
        parts = strategy.all_gather(part.to(strategy.root_device))
        if trainer.is_global_zero:
            gathered.append(parts.cpu().reshape(len(sizes), -1))
    if not trainer.is_global_zero:
        return [mine]
    rows = torch.cat(gathered, dim=1)
    return [
        torch.load(io.BytesIO(row[:size].numpy().tobytes()), weights_only=True)
        for row, size in zip(rows, sizes, strict=True)
    ]
