"""Seeds for loader workers, batches and samples.

Objects that are sent to workers must be picklable (``spawn``), so this module avoids closures.
"""

import operator
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from torch.utils.data import get_worker_info

from lightning_d9m.control.data.data_state import DataState, WorkerWatch
from lightning_d9m.control.data.resumable_sampler import MicroBatches, SeededIndex
from lightning_d9m.control.seeding import RandomStreams, capture_host, restore_rng, seed_host
from lightning_d9m.errors import SettingError


def init_worker(
    stream: RandomStreams,
    user_function: Callable[[int], None] | None,
    is_first: bool,
    worker: int,
) -> None:
    """Seed a worker when it starts, then call the user's own ``worker_init_fn``."""
    # A loader that is iterated again within an epoch (the shorter of two) gets new workers, which
    # must not repeat the draws. torch draws a different base seed for them.
    info: Any = get_worker_info()
    index = 0 if is_first else info.seed - worker
    seed_host(stream.derive("worker", worker=worker, index=index))
    if user_function is not None:
        user_function(worker)


class SeededDataset:
    """Makes the batches of a dataset; each begins with its own seed.

    It stands for the user's dataset in the iterators of a loader. A ``worker_init_fn`` sees and
    sets the attributes of the dataset, by which it can split a stream among workers.

    Args:
        dataset: The user's dataset.
        stream: The loader's random streams.
        per_sample: Seed before each sample by (seed, epoch, index); otherwise before each batch, by
            (seed, rank, epoch, number of the batch).
        collate: The user's ``collate_fn``, which continues the random streams of its samples; None
            for an iterable dataset.
        state: The state of the main process's objects, which the first batch may complete.
    """

    def __init__(
        self,
        dataset: Any,
        stream: RandomStreams,
        per_sample: bool = False,
        collate: Any = None,
        state: DataState | None = None,
    ) -> None:
        vars(self).update(
            _dataset=dataset, _stream=stream, _per_sample=per_sample, _collate=collate,
            _state=state, _watch=None, _iterated=False,
        )  # fmt: skip

    @property  # type: ignore[misc] # `isinstance` reads it, of the dataset that this stands for
    def __class__(self) -> type:
        return type(self._dataset)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._dataset, name, value)

    def __len__(self) -> int:
        return len(self._dataset)

    def __reduce__(self) -> tuple[Any, ...]:
        return SeededDataset, (self._dataset, self._stream, self._per_sample, self._collate)

    def __iter__(self) -> Iterator[Any]:
        # Called in a worker at its start, after `init_worker` has seeded it, and in every epoch.
        info = get_worker_info()
        if self._iterated and info is not None and self._stream.follow():
            seed_host(self._stream.derive("worker", worker=info.id))
        vars(self)["_iterated"] = True
        samples, watch = iter(self._dataset), self._find_watch()
        return samples if watch is None else watch.watch(samples)

    def _find_watch(self) -> WorkerWatch | None:
        """Return what looks for changes in this worker; None in the main process."""
        if get_worker_info() is None or self._stream.report is None:
            return None
        if self._watch is None:
            owners = {"dataset": self._dataset, "collate_fn": self._collate}
            vars(self)["_watch"] = WorkerWatch(owners, self._stream.report_change)
        return self._watch  # type: ignore[no-any-return]

    def __getitem__(self, request: SeededIndex) -> Any:
        """Return what a loader gives for one index, if it does not batch."""
        return self._load(request, self._fetch_sample)

    def __getitems__(self, request: SeededIndex | list[SeededIndex]) -> Any:
        """Return a batch, or the micro-batches of logical ranks."""
        if isinstance(request, SeededIndex):
            return self._load(request, self._fetch_batch)
        return MicroBatches(map(self.__getitems__, request))

    def _load(self, request: SeededIndex, fetch: Callable[[Any, int], Any]) -> Any:
        watch = self._find_watch()
        # In a worker the generators need not be restored.
        saved = capture_host() if get_worker_info() is None else None
        seed_host(request.seed)
        try:
            batch = self._collate(fetch(request.indices, request.epoch))
        finally:
            if saved is not None:
                restore_rng(saved)
        if watch is not None:
            watch.end_batch()
        elif self._state is not None:
            self._state.settle()
            vars(self)["_state"] = None
        return batch

    def _fetch_batch(self, indices: Any, epoch: int) -> Any:
        fetch = getattr(self._dataset, "__getitems__", None)
        # With a seed per sample, fetch them one by one.
        if fetch is None or self._per_sample:
            return [self._fetch_sample(index, epoch) for index in indices]
        return fetch(indices)

    def _fetch_sample(self, index: Any, epoch: int) -> Any:
        if self._per_sample:
            stream = self._stream
            if stream.epoch != epoch:  # in a worker that started in a different epoch
                stream = replace(stream, epoch=epoch, shared=None)
            seed_host(stream.derive("sample", index=_index_text(index), shared=True))
        return self._dataset[index]


def return_batch(batch: Any) -> Any:
    """Return what a ``SeededDataset`` has made: the ``collate_fn`` of an iterator."""
    return batch


def _index_text(index: Any) -> int | str:
    """Return the identity of a sample as text, independent of the type of its numbers."""
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
            f"per_sample_rng is on and the sampler gives {index!r} as an index; allowed: integers, "
            "strings, floats, and tuples or lists of them, because the seed of a sample is "
            "derived from its index. Change the sampler, or switch per_sample_rng off."
        ) from None
