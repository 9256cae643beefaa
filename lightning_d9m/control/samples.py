"""Seeding inside loader workers, and for single samples.

What is sent to a worker must survive pickling (``spawn``), so nothing here is a closure.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from lightning_d9m.control.seeding import capture_rng, derive_seed, restore_rng, seed_host


@dataclass(frozen=True)
class Stream:
    """Which random streams a loader draws from.

    Attributes:
        seed: The base seed.
        fit: Ordinal of the fit in its process.
        rank: The data-parallel rank.
        loader: Stage and number of the loader, such as ``"train 0"``.
        epoch: The epoch, int64 of shape (1,), in shared memory: workers that live for several
            epochs see it change.
    """

    seed: int
    fit: int
    rank: int
    loader: str
    epoch: torch.Tensor

    def derive(self, purpose: str, *, worker: int = 0, index: int = 0, shared: bool = False) -> int:
        """Return a seed of this stream in the current epoch; ``shared`` by all ranks."""
        return derive_seed(
            self.seed,
            f"{self.loader} {purpose}",
            fit=self.fit,
            rank=0 if shared else self.rank,
            worker=worker,
            epoch=int(self.epoch),
            index=index,
        )


@dataclass(frozen=True)
class WorkerInit:
    """Seeds a worker when it starts, then calls the user's own ``worker_init_fn``."""

    stream: Stream
    users: Callable[[int], None] | None

    def __call__(self, worker: int) -> None:
        """Seed Python, NumPy and torch in this worker."""
        seed_host(self.stream.derive("worker", worker=worker))
        if self.users is not None:
            self.users(worker)


class SeededDataset:
    """A dataset that seeds the generators before it hands out samples.

    It stands in for the user's dataset while a loader is under control, and answers for it in
    everything else.

    Args:
        dataset: The user's dataset.
        stream: The loader's random streams.
        per_sample: Seed before each sample by (seed, epoch, index); otherwise only a worker that
            lives for several epochs is seeded anew, when an epoch begins.
    """

    def __init__(self, dataset: Any, stream: Stream, *, per_sample: bool) -> None:
        self._dataset = dataset
        self._stream = stream
        self._per_sample = per_sample
        self._seeded_epoch: int | None = None

    def __getattr__(self, name: str) -> Any:
        # `__getitems__` fetches a batch at once: with a seed for each sample, one by one instead.
        if name.startswith("__") and (name != "__getitems__" or self._per_sample):
            raise AttributeError(name)
        if name == "_dataset":  # not there yet while this is being unpickled
            raise AttributeError(name)
        value = getattr(self._dataset, name)
        if name == "__getitems__":
            self._seed_epoch()
        return value

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: Any) -> Any:
        if not self._per_sample:
            self._seed_epoch()
            return self._dataset[index]
        seed = self._stream.derive("sample", index=index, shared=True)
        if get_worker_info() is not None:
            seed_host(seed)
            return self._dataset[index]
        # In the main process the model draws from the same generators.
        state = capture_rng()
        try:
            seed_host(seed)
            return self._dataset[index]
        finally:
            restore_rng(state)

    def _seed_epoch(self) -> None:
        """Seed a worker anew when it meets another epoch than the one it started in."""
        info = get_worker_info()
        if info is None:
            return
        before, self._seeded_epoch = self._seeded_epoch, int(self._stream.epoch)
        # In the epoch in which it started, `WorkerInit` seeded it, then the user's function did.
        if before not in (None, self._seeded_epoch):
            seed_host(self._stream.derive("worker", worker=info.id))


class SeededIterable(SeededDataset, IterableDataset[Any]):
    """The same for a dataset that is iterated: its worker is seeded when it starts anew."""

    def __iter__(self) -> Iterator[Any]:
        self._seed_epoch()
        yield from self._dataset
