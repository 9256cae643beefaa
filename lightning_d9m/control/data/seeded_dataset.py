"""Seeds for loader workers, batches and samples.

Objects that are sent to workers must be picklable (``spawn``), so this module avoids closures.
"""

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch.utils.data import get_worker_info

from lightning_d9m.control.data.data_state import DataState, WorkerWatch
from lightning_d9m.control.data.micro_batches import MicroBatches
from lightning_d9m.control.data.resumable_sampler import Proxy, SeededIndex, SeededMicroBatches
from lightning_d9m.control.seeding import (
    RandomStreams,
    RngState,
    capture_host,
    restore_rng,
    seed_host,
)
from lightning_d9m.errors import SettingError


@dataclass(frozen=True)
class WorkerInit:
    """Seeds a worker when it starts, then calls the user's own ``worker_init_fn``."""

    stream: RandomStreams
    user_function: Callable[[int], None] | None

    def __call__(self, worker: int) -> None:
        """Seed Python, NumPy and torch in this worker."""
        info = get_worker_info()
        drawn = self.stream.workers if info is None else info.seed - worker
        # A loader that is iterated again within an epoch (the shorter of two) gets new workers,
        # which must not repeat the draws. torch draws a different base seed for them.
        index = 0 if drawn == self.stream.workers else drawn
        seed_host(self.stream.derive("worker", worker=worker, index=index))
        if self.user_function is not None:
            self.user_function(worker)


class RngGuard:
    """Seeds the generators while the main process loads a batch, and restores them.

    In a worker the generators need not be restored.
    """

    def __init__(self) -> None:
        self._saved: RngState | None = None

    def begin(self, seed: int) -> None:
        """Save the state of the generators and seed them."""
        if self._saved is None and get_worker_info() is None:
            self._saved = capture_host()
        seed_host(seed)

    def end(self) -> None:
        """Restore the generators; do nothing without a ``begin``."""
        if self._saved is not None:
            saved, self._saved = self._saved, None
            restore_rng(saved)


class SeededCollate:
    """The user's ``collate_fn``, which continues the random streams of its samples."""

    def __init__(self, user_function: Callable[[Any], Any], guard: RngGuard) -> None:
        vars(self).update(user_function=user_function, _guard=guard)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "user_function" not in vars(self):
            raise AttributeError(name)
        return getattr(self.user_function, name)

    def __call__(self, samples: Any) -> Any:
        """Make a batch of samples, or the micro-batches of requests."""
        if isinstance(samples, MicroBatches):
            # One after the other, because this function may draw after the samples of its batch.
            return MicroBatches(self(fetch()) for fetch in samples)
        try:
            return self.user_function(samples)
        finally:
            self._guard.end()


class SeededDataset(Proxy):
    """A proxy of the user's dataset that seeds the generators before it returns samples.

    A ``worker_init_fn`` can split a stream among workers by its attributes.

    Args:
        dataset: The user's dataset.
        stream: The loader's random streams.
        per_sample: Seed before each sample by (seed, epoch, index); otherwise before each batch, by
            (seed, rank, epoch, number of the batch).
        guard: Restores the generators when the batch is made.
        collate: The user's ``collate_fn``.
        state: The state of the main process's objects, which the first batch may complete.
    """

    def __init__(
        self,
        dataset: Any,
        stream: RandomStreams,
        per_sample: bool,
        guard: RngGuard,
        collate: Any = None,
        state: DataState | None = None,
    ) -> None:
        super().__init__(
            dataset, _stream=stream, _per_sample=per_sample, _guard=guard, _collate=collate,
            _state=state, _watch=None, _iterated=False,
        )  # fmt: skip

    def __reduce__(self) -> tuple[Any, ...]:
        kept = (self._d9m_target, self._stream, self._per_sample, self._guard, self._collate)
        return SeededDataset, kept

    def __iter__(self) -> Iterator[Any]:
        # Called in a worker at its start, after `WorkerInit` has seeded it, and in every epoch.
        info = get_worker_info()
        if self._iterated and info is not None and self._stream.follow():
            seed_host(self._stream.derive("worker", worker=info.id))
        vars(self)["_iterated"] = True
        samples = self._watched()
        return iter(self._d9m_target) if samples is None else samples.watch(iter(self._d9m_target))

    def _watched(self) -> WorkerWatch | None:
        """Return what looks for changes in this worker; None in the main process."""
        if get_worker_info() is None or self._stream.report is None:
            return None
        if self._watch is None:
            owners = {"dataset": self._d9m_target, "collate_fn": self._collate}
            vars(self)["_watch"] = WorkerWatch(owners, self._stream.report_change)
        return self._watch  # type: ignore[no-any-return]

    def __getitem__(self, request: Any) -> Any:
        # A single sample: of a loader that does not batch, or of other code.
        if isinstance(request, SeededIndex):
            return self._fetch(request, lambda: self._fetch_sample(request.indices, request.epoch))
        if not self._per_sample:
            return self._d9m_target[request]
        single = SeededIndex(request, 0, self._stream.epoch)
        try:
            return self[single]
        finally:
            self._guard.end()

    def __getitems__(self, request: Any) -> Any:
        """Fetch a whole batch, as torch's loader does."""
        if isinstance(request, SeededMicroBatches):
            return MicroBatches(partial(self.__getitems__, part) for part in request)
        if isinstance(request, SeededIndex):
            return self._fetch(request, lambda: self._fetch_batch(request.indices, request.epoch))
        if self._per_sample:
            return [self[index] for index in request]
        return self._fetch_batch(request, self._stream.epoch)

    def _fetch(self, request: SeededIndex, fetch: Callable[[], Any]) -> Any:
        watch = self._watched()
        self._guard.begin(request.seed)
        try:
            samples = fetch()
        except BaseException:
            self._guard.end()
            raise
        if watch is not None:
            watch.end_batch()
        elif self._state is not None:
            self._state.settle()
            vars(self)["_state"] = None
        return samples

    def _fetch_batch(self, indices: Any, epoch: int) -> Any:
        fetch = getattr(self._d9m_target, "__getitems__", None)
        # With a seed per sample, fetch them one by one.
        if self._per_sample:
            return [self._fetch_sample(index, epoch) for index in indices]
        if fetch is None:
            dataset = self._d9m_target
            return [dataset[index] for index in indices]
        return fetch(indices)

    def _fetch_sample(self, index: Any, epoch: int) -> Any:
        if self._per_sample:
            stream = self._stream
            if stream.epoch != epoch:  # in a worker that started in a different epoch
                stream = replace(stream, epoch=epoch, shared=None)
            seed_host(stream.derive("sample", index=_index_text(index), shared=True))
        return self._d9m_target[index]


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
