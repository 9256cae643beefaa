"""The ranks of a Trainer."""

from typing import TYPE_CHECKING

import torch

from lightning_d9m.errors import SettingError
from lightning_d9m.ranks.ranks import Ranks

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


def ranks_of(trainer: "Trainer") -> Ranks:
    """Return the Trainer's ranks, which communicate through its strategy.

    Raises:
        SettingError: From the gather, if the strategy does not gather from all ranks.
    """
    if trainer.world_size == 1:
        return Ranks(trainer.global_rank)

    def exchange(data: bytes) -> list[bytes]:
        local = torch.frombuffer(bytearray(data), dtype=torch.int64)
        gathered = trainer.strategy.all_gather(local.to(trainer.strategy.root_device))
        if gathered.numel() != trainer.world_size * len(local):
            raise SettingError(
                f"The Trainer has {trainer.world_size} ranks, but all_gather of "
                f"{type(trainer.strategy).__name__} returned {gathered.numel()} values for "
                f"{len(local)} of each rank. Start one process for each rank and initialize "
                "their process group, or set the number of devices to 1."
            )
        return [row.numpy().tobytes() for row in gathered.cpu().reshape(trainer.world_size, -1)]

    return Ranks(trainer.global_rank, exchange)
