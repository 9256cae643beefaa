"""Seeding inside loader workers, and for single samples.

What is sent to a worker must survive pickling (``spawn``), so nothing here is a closure.
"""

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import get_worker_info

from lightning_d9m.control.seeding import capture_host_rng, derive_seed, restore_rng, seed_host
from lightning_d9m.errors import SettingError


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


@dataclass(frozen=True)
class WorkerInit:
    """Seeds a worker when it starts, then calls the user's own ``worker_init_fn``."""

    stream: Stream
    users: Callable[[int], None] | None

    def __call__(self, worker: int) -> None:
        """Seed Python, NumPy and torch in this worker."""
        info = get_worker_info()
        drawn = self.stream.workers if info is None else info.seed - worker
        # A loader that is iterated again within an epoch (the shorter one of two) has new workers,
        # which must not draw the same again; torch draws another base seed for them.
        index = 0 if drawn == self.stream.workers else drawn
        seed_host(self.stream.derive("worker", worker=worker, index=index))
        if self.users is not None:
            self.users(worker)


class SeededDataset:
    """A dataset that seeds the generators before it hands out samples.

    It stands in for the user's dataset while a loader is under control, and answers for it in
    everything else: ``isinstance`` sees the user's class, attributes are got from the user's object
    and set there (which is how a ``worker_init_fn`` shares a stream out among workers).

    Args:
        dataset: The user's dataset.
        stream: The loader's random streams.
        per_sample: Seed before each sample by (seed, epoch, index); otherwise only a worker that
            lives for several epochs is seeded anew, when an epoch begins.
    """

    def __init__(self, dataset: Any, stream: Stream, per_sample: bool) -> None:
        # Not as attributes: those are the user's dataset's.
        vars(self).update(_dataset=dataset, _stream=stream, _per_sample=per_sample, _iterated=False)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._dataset)

    def __reduce__(self) -> tuple[Any, ...]:
        return SeededDataset, (self._dataset, self._stream, self._per_sample)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._dataset, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._dataset, name)

    def __len__(self) -> int:
        return len(self._dataset)

    def __iter__(self) -> Iterator[Any]:
        # Called in a worker, at its start (`WorkerInit` has seeded it) and when an epoch begins.
        if self._iterated:
            self._seed_epoch()
        vars(self)["_iterated"] = True
        return iter(self._dataset)

    def __getitem__(self, index: Any) -> Any:
        if not self._per_sample:
            self._seed_epoch()
            return self._dataset[index]
        self._stream.follow()
        seed = self._stream.derive("sample", index=_index_text(index), shared=True)
        if get_worker_info() is not None:
            seed_host(seed)
            return self._dataset[index]
        # In the main process the model draws from the same generators.
        state = capture_host_rng()
        try:
            seed_host(seed)
            return self._dataset[index]
        finally:
            restore_rng(state)

    def __getitems__(self, indices: Sequence[Any]) -> Any:
        """Fetch a batch at once, as torch's loader does where a dataset offers it."""
        fetch = getattr(self._dataset, "__getitems__", None)
        # With a seed for each sample they are fetched one by one.
        if self._per_sample or fetch is None:
            return [self[index] for index in indices]
        self._seed_epoch()
        return fetch(indices)

    def _seed_epoch(self) -> None:
        """Seed a long-lived worker anew when it meets another epoch."""
        info = get_worker_info()
        if info is not None and self._stream.follow():
            seed_host(self._stream.derive("worker", worker=info.id))


def _index_text(index: Any) -> int | str:
    """Return what identifies a sample: the same in every run, whatever holds the numbers."""
    if isinstance(index, str):
        return repr(str(index))
    if isinstance(index, float):
        return float(index).hex()
    if isinstance(index, tuple | list):
        return f"({','.join(str(_index_text(part)) for part in index)})"
    try:
        return operator.index(index)
    except TypeError:
        raise SettingError(
            f"per_sample_rng is on and the sampler gives {index!r} as an index; allowed are whole "
            "numbers, strings, floats, and tuples or lists of them, for the seed of a sample is "
            "derived from its index. Change the sampler, or switch per_sample_rng off."
        ) from None
