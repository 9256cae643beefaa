"""The ranks of a Trainer."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from lightning_d9m.errors import SettingError
from lightning_d9m.recording.collective import Ranks

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


def ranks_of(trainer: "Trainer") -> Ranks:
    """Return the Trainer's ranks, which communicate through its strategy.

    Raises:
        SettingError: From the gather, if the strategy does not gather from all ranks.
    """
    if trainer.world_size == 1:
        return Ranks(trainer.global_rank)

    def gather(numbers: Sequence[int]) -> list[list[int]]:
        local = torch.tensor(numbers, dtype=torch.int64, device=trainer.strategy.root_device)
        gathered = trainer.strategy.all_gather(local)
        if gathered.numel() != trainer.world_size * len(numbers):
            raise SettingError(
                f"The Trainer has {trainer.world_size} ranks, but all_gather of "
                f"{type(trainer.strategy).__name__} returned {gathered.numel()} values for "
                f"{len(numbers)} of each rank. Start one process for each rank and initialize "
                "their process group, or set the number of devices to 1."
            )
        rows: list[list[int]] = gathered.reshape(trainer.world_size, -1).tolist()
        return rows

    return Ranks(trainer.global_rank, gather)
