"""Seeding inside loader workers, and for single batches and samples.

What is sent to a worker must survive pickling (``spawn``), so nothing here is a closure.
"""

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.data import (
    Subset,
    TensorDataset,
    default_collate,
    default_convert,
    get_worker_info,
)
from torch.utils.data._utils import collate as _collate

from lightning_d9m.control.random_streams import Stream
from lightning_d9m.control.resumable_sampler import SeededIndex
from lightning_d9m.control.seeding import RngState, capture_host_rng, restore_rng, seed_host
from lightning_d9m.errors import SettingError


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


class RngGuard:
    """The generators of the process while a batch is loaded in it: seeded, and then given back.

    In a worker there is nothing to give back.
    """

    def __init__(self) -> None:
        self._kept: RngState | None = None

    def begin(self, seed: int) -> None:
        """Seed the generators, and keep what they were."""
        if get_worker_info() is None and self._kept is None:
            self._kept = capture_host_rng()
        seed_host(seed)

    def end(self) -> None:
        """Give the generators back; where nothing was begun, do nothing."""
        if self._kept is not None:
            kept, self._kept = self._kept, None
            restore_rng(kept)


class NoRngGuard(RngGuard):
    """For data that ``draws_nothing``: what nobody draws from is neither seeded nor kept."""

    def begin(self, seed: int) -> None:
        """Do nothing."""

    def end(self) -> None:
        """Do nothing."""


def draws_nothing(loader: Any) -> bool:
    """Return whether no code but torch's own makes a batch, and that draws no random number.

    So it is with a ``TensorDataset`` of plain tensors, or a ``Subset`` of one. To leave the
    generators alone there saves most of what control costs per batch.
    """
    dataset = loader.dataset
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return (
        type(dataset) is TensorDataset
        and all(type(tensor) is torch.Tensor for tensor in dataset.tensors)
        and (loader.collate_fn is default_collate or loader.collate_fn is default_convert)
        and _collate.default_collate_fn_map.get(torch.Tensor) is _collate.collate_tensor_fn
    )


class SeededCollate:
    """The user's ``collate_fn``, which draws on from where the samples of its batch left off."""

    def __init__(self, users: Callable[[Any], Any], apart: RngGuard) -> None:
        vars(self).update(users=users, _apart=apart)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "users" not in vars(self):
            raise AttributeError(name)
        return getattr(self.users, name)

    def __call__(self, samples: Any) -> Any:
        """Make a batch of samples."""
        try:
            return self.users(samples)
        finally:
            self._apart.end()


class SeededDataset:
    """A dataset that seeds the generators before it hands out samples.

    It stands in for the user's dataset while a loader is under control, and answers for it in
    everything else: ``isinstance`` sees the user's class, attributes are got from the user's object
    and set there (which is how a ``worker_init_fn`` shares a stream out among workers).

    Args:
        dataset: The user's dataset.
        stream: The loader's random streams.
        per_sample: Seed before each sample by (seed, epoch, index); otherwise before each batch, by
            (seed, rank, epoch, number of the batch).
        apart: What gives the generators back when the batch is made.
    """

    def __init__(self, dataset: Any, stream: Stream, per_sample: bool, apart: RngGuard) -> None:
        # Not as attributes: those are the user's dataset's.
        vars(self).update(
            _dataset=dataset, _stream=stream, _per_sample=per_sample, _apart=apart, _iterated=False
        )

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._dataset)

    def __reduce__(self) -> tuple[Any, ...]:
        return SeededDataset, (self._dataset, self._stream, self._per_sample, self._apart)

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
        info = get_worker_info()
        if self._iterated and info is not None and self._stream.follow():
            seed_host(self._stream.derive("worker", worker=info.id))
        vars(self)["_iterated"] = True
        return iter(self._dataset)

    def __getitem__(self, asked: Any) -> Any:
        # A sample on its own: of a loader that does not batch, or of code that is no loader.
        if isinstance(asked, SeededIndex):
            return self._fetch(asked, lambda: self._fetch_sample(asked.indices, asked.epoch))
        if not self._per_sample:
            return self._dataset[asked]
        alone = SeededIndex(asked, 0, self._stream.epoch)
        try:
            return self[alone]
        finally:
            self._apart.end()

    def __getitems__(self, asked: Any) -> Any:
        """Fetch a batch at once, as torch's loader asks for it."""
        if isinstance(asked, SeededIndex):
            return self._fetch(asked, lambda: self._fetch_batch(asked.indices, asked.epoch))
        if self._per_sample:
            return [self[index] for index in asked]
        return self._fetch_batch(asked, self._stream.epoch)

    def _fetch(self, asked: SeededIndex, fetch: Callable[[], Any]) -> Any:
        self._apart.begin(asked.seed)
        try:
            return fetch()
        except BaseException:
            self._apart.end()
            raise

    def _fetch_batch(self, indices: Any, epoch: int) -> Any:
        fetch = getattr(self._dataset, "__getitems__", None)
        # With a seed for each sample they are fetched one by one.
        if self._per_sample or fetch is None:
            return [self._fetch_sample(index, epoch) for index in indices]
        return fetch(indices)

    def _fetch_sample(self, index: Any, epoch: int) -> Any:
        if self._per_sample:
            stream = self._stream
            if stream.epoch != epoch:  # in a worker that was started in another one
                stream = replace(stream, epoch=epoch, shared=None)
            seed_host(stream.derive("sample", index=_index_text(index), shared=True))
        return self._dataset[index]


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
