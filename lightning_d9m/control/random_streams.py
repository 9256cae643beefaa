"""The random streams of a loader."""

from dataclasses import dataclass, replace

import torch

from lightning_d9m.control.seeding import derive_seed


@dataclass
class RandomStreams:
    """The seeds of a loader's random streams. Each worker gets a copy when it starts.

    Attributes:
        seed: The base seed.
        fit: Ordinal of the fit in its process.
        rank: The data-parallel rank.
        stage: ``"train"``, ``"validate"``, ``"test"`` or ``"predict"``.
        number: Ordinal of the loader in its stage.
        epoch: The current epoch of this process.
        workers: The base seed that torch draws for the workers of the epoch's first iteration.
        starts: How often an epoch was started, or started again.
        shared: In shared memory for persistent workers, int64 of shape (3,): the current epoch of
            the main process, whether a worker's dataset has changed its numbers, and ``starts``.
            None without such workers.
    """

    seed: int
    fit: int
    rank: int
    stage: str
    number: int = 0
    epoch: int = 0
    workers: int = 0
    starts: int = 0
    shared: torch.Tensor | None = None

    def start_epoch(self, epoch: int) -> None:
        """Enter an epoch in the main process."""
        self.epoch = epoch
        self.starts += 1
        if self.shared is not None:
            self.shared[0], self.shared[2] = epoch, self.starts

    def at_epoch(self) -> "RandomStreams":
        """Return a copy that stays in the current epoch."""
        return replace(self, shared=None)

    def follow(self) -> bool:
        """Enter the main process's epoch; return whether it was started since the last call."""
        before = self.starts
        if self.shared is not None:
            self.epoch, _, self.starts = map(int, self.shared.tolist())
        return self.starts != before

    def report_changed_numbers(self) -> None:
        """Tell the main process that iterating changes numbers of the dataset."""
        if self.shared is not None:
            self.shared[1] = 1

    @property
    def has_changed_numbers(self) -> bool:
        """True if the dataset in a persistent worker has changed its numbers."""
        return self.shared is not None and bool(self.shared[1])

    def derive(
        self, purpose: str, *, worker: int = 0, index: int | str = 0, shared: bool = False
    ) -> int:
        """Return a seed for the current epoch; with ``shared``, the same on all ranks."""
        return derive_seed(
            self.seed,
            f"{self.stage} {self.number} {purpose}",
            fit=self.fit,
            rank=0 if shared else self.rank,
            worker=worker,
            epoch=self.epoch,
            index=index,
        )
