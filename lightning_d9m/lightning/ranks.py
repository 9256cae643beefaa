"""The ranks of a Trainer."""

from collections.abc import Sequence
from typing import Any

import torch

from lightning_d9m.recording.collective import Ranks


def ranks_of(trainer: Any) -> Ranks:
    """Return the Trainer's ranks, who talk through its strategy."""
    if trainer.world_size == 1:
        return Ranks(trainer.global_rank)

    def gather(numbers: Sequence[int]) -> list[list[int]]:
        local = torch.tensor(numbers, dtype=torch.int64, device=trainer.strategy.root_device)
        gathered = trainer.strategy.all_gather(local)
        rows: list[list[int]] = gathered.reshape(trainer.world_size, -1).tolist()
        return rows

    return Ranks(trainer.global_rank, gather)
