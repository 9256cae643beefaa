"""The random streams of a loader, by name."""

from dataclasses import dataclass, replace

import torch

from lightning_d9m.control.seeding import derive_seed


@dataclass
class Stream:
    """Which random streams a loader draws from. A worker gets a copy of its own when it starts.

    Attributes:
        seed: The base seed.
        fit: Ordinal of the fit in its process.
        rank: The data-parallel rank.
        stage: ``"train"``, ``"validate"``, ``"test"`` or ``"predict"``.
        number: Ordinal of the loader in its stage.
        epoch: The epoch that this process is in.
        workers: What torch draws for the workers of the epoch's first iteration.
        shared: The epoch that the main process is in, int64 of shape (1,), in shared memory: seen
            by workers that live for several epochs. None where none do.
    """

    seed: int
    fit: int
    rank: int
    stage: str
    number: int = 0
    epoch: int = 0
    workers: int = 0
    shared: torch.Tensor | None = None

    def start_epoch(self, epoch: int) -> None:
        """Enter an epoch, in the main process."""
        self.epoch = epoch
        if self.shared is not None:
            self.shared.fill_(epoch)

    def at_epoch(self) -> "Stream":
        """Return a copy that stays in this epoch."""
        return replace(self, shared=None)

    def follow(self) -> bool:
        """Enter the main process's epoch; return whether it is another one."""
        before = self.epoch
        if self.shared is not None:
            self.epoch = int(self.shared)
        return self.epoch != before

    def derive(
        self, purpose: str, *, worker: int = 0, index: int | str = 0, shared: bool = False
    ) -> int:
        """Return a seed of this stream in its epoch; ``shared`` by all ranks."""
        return derive_seed(
            self.seed,
            f"{self.stage} {self.number} {purpose}",
            fit=self.fit,
            rank=0 if shared else self.rank,
            worker=worker,
            epoch=self.epoch,
            index=index,
        )
