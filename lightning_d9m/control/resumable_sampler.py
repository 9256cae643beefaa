"""The position in a loader: which batch is asked for next, and from where a resumed epoch goes on.

What a batch draws is seeded by its place in the epoch. So it depends neither on the worker that
loads it nor on the batches before it, and those that were consumed need not be loaded again.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from itertools import islice
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    get_worker_info,
)

from lightning_d9m.control.generators import find_generators
from lightning_d9m.control.random_streams import Stream
from lightning_d9m.control.seeding import RngState, capture_host_rng, restore_rng, seed_host

# Samplers of these packages draw from the generator that they are given, or from none.
_KNOWN = {"builtins", "torch", "torchdata", "lightning", "lightning_fabric", "pytorch_lightning"}


@dataclass(frozen=True, slots=True)
class SeededIndex:
    """What a loader asks of its dataset. It is sent to a worker, so it can be pickled.

    Attributes:
        indices: What the sampler gave: the indices of a batch, or one index.
        seed: The seed of what is drawn for it.
        epoch: The epoch that it belongs to.
    """

    indices: Any
    seed: int
    epoch: int

    def __len__(self) -> int:
        return len(self.indices)

    def __iter__(self) -> Iterator[Any]:
        # torch iterates over it where it fetches a batch of an iterable dataset. In the main
        # process that draws from the generators of the training, which a checkpoint holds.
        if get_worker_info() is not None:
            seed_host(self.seed)
        return iter(self.indices)


class ResumableSampler:
    """Stands in for the sampler that a loader takes its batches from, and numbers them.

    It answers for the user's sampler in everything else.

    Args:
        sampler: The user's batch sampler; of a loader that does not batch, the sampler.
        stream: The loader's random streams.
        foreign: Whether a sampler of the user's own making is involved. Such a one may draw from
            the generators of the process: it gets a state of them for itself, so that its order
            does not depend on what training draws, nor on how far workers are ahead.
        still: Whether nothing is drawn where a batch is made, so that no seed is derived for it.
    """

    def __init__(self, sampler: Any, stream: Stream, *, foreign: bool, still: bool) -> None:
        vars(self).update(
            _users=sampler, _stream=stream, _foreign=foreign, _still=still, _round=0, _skip=0,
            _cycled=bool,
        )  # fmt: skip

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._users)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._users, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._users, name, value)

    def __len__(self) -> int:
        return len(self._users)

    def start_epoch(self, skip: int = 0, cycled: Callable[[], bool] = bool) -> None:
        """Begin an epoch.

        Args:
            skip: How many batches of it were consumed before.
            cycled: Whether the loader is iterated anew within the epoch when it ends; asked when it
                is iterated.
        """
        vars(self).update(_round=0, _skip=skip, _cycled=cycled)

    def __iter__(self) -> Iterator[SeededIndex]:
        # A generator: torch makes two iterators for new workers and takes from the second only.
        while True:
            number = self._round
            # The epoch may have changed when the last batch is asked for.
            stream = self._stream.at_epoch()
            batches = self._iterate()
            skipped = 0
            if self._skip:
                batches, skipped = skip_batches(batches, self._skip)
            vars(self).update(_round=number + 1, _skip=self._skip - skipped)
            if not self._skip:
                break
            if not self._cycled() or not skipped:
                vars(self)["_skip"] = 0
                return
        for place, indices in enumerate(batches, skipped):
            seed = 0 if self._still else stream.derive("batch", index=f"{number}.{place}")
            yield SeededIndex(indices, seed, stream.epoch)

    def _iterate(self) -> Iterable[Any]:
        if not self._foreign:
            return self._users  # type: ignore[no-any-return]
        # All ranks alike: it may deal out one order to them.
        seed = self._stream.derive("sampler", index=self._round, shared=True)
        return iterate_apart(self._users, seed)


def find_position_problem(loader: Any) -> str | None:
    """Return why a loader cannot go on exactly within an epoch, in a sentence, if so."""
    keeps = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
    if not isinstance(loader, DataLoader):
        return None if keeps else _no_position(loader)
    if isinstance(loader.dataset, IterableDataset):
        return _find_stream_problem(loader) if keeps else _no_position(loader.dataset)
    return find_worker_problem(loader)


def find_worker_problem(loader: Any) -> str | None:
    """Return which generators live on in a loader's workers, out of reach, in a sentence, if any.

    Workers that end with the epoch begin with a copy of the main process's in the next.
    """
    if not isinstance(loader, DataLoader) or loader.num_workers == 0:
        return None
    kept = find_generators({"dataset": loader.dataset, "collate_fn": loader.collate_fn})
    if not kept:
        return None
    # Their stand-ins keep what is the user's.
    paths = ", ".join(kept).replace("._dataset.", ".").replace("_fn.users.", "_fn.")
    return (
        f"The loader of {loader.dataset.__class__.__name__} draws from generators of the "
        f"user's own ({paths}), whose state in the loader's workers cannot be "
        "saved. Let it draw from the generators of Python, NumPy or torch, which are "
        "seeded for each batch."
    )


def _find_stream_problem(loader: Any) -> str | None:
    name = loader.dataset.__class__.__name__
    if not hasattr(loader.dataset, "__len__"):
        return (
            f"{name} has no __len__, so that Lightning fetches one batch ahead, "
            "and the loader's state is one batch ahead of the training. Give it a __len__."
        )
    if loader.num_workers > 0 and loader.batch_size is None:
        return (
            f"{name} makes batches of its own in workers, whose generators cannot be "
            "saved. Let the loader make them (batch_size), or use num_workers=0."
        )
    return None


def _no_position(data: Any) -> str:
    return (
        f"{data.__class__.__name__} gives samples one after the other and cannot say where it "
        "was, so that the batches that were trained would be trained again. Load it with "
        "torchdata's StatefulDataLoader, or save checkpoints at the end of an epoch."
    )


def unwrap(sampler: Any) -> Any:
    """Return the user's sampler for one that stands in for it, or else what was given."""
    return vars(sampler)["_users"] if type(sampler) is ResumableSampler else sampler


def is_foreign(samplers: Iterable[Any]) -> bool:
    """Return whether any of the samplers may draw from the generators of the process."""
    return any(type(sampler).__module__.partition(".")[0] not in _KNOWN for sampler in samplers)


def skip_batches(batches: Iterable[Any], count: int) -> tuple[Iterator[Any], int]:
    """Return what follows the first ``count`` batches, and how many there were to skip.

    Nothing is loaded: the sampler gives their indices, and they are dropped.
    """
    if type(batches) is BatchSampler and hasattr(batches.sampler, "__len__"):
        # Index by index, without a list for each batch.
        skipped = min(count, len(batches))
        indices = _skip_indices(batches.sampler, skipped * batches.batch_size)
        if skipped == len(batches):
            _exhaust(indices)  # what it draws at its end, it must have drawn
        return iter(BatchSampler(indices, batches.batch_size, batches.drop_last)), skipped
    iterator = iter(batches)
    skipped = sum(1 for _ in islice(iterator, count))
    return iterator, skipped


def _skip_indices(sampler: Any, count: int) -> Iterator[Any]:
    shuffles = type(sampler) is RandomSampler and not sampler.replacement
    once = shuffles and sampler.num_samples == len(sampler.data_source)
    # Without a generator it makes one of its own, from what the process draws.
    if once and sampler.generator is not None and _shuffles_alike():
        return _shuffle(sampler, count)
    indices: Iterator[Any] = iter(sampler)
    _exhaust(islice(indices, count))
    return indices


def _shuffle(sampler: Any, skip: int) -> Iterator[int]:
    """Do as torch's sampler does, but make no numbers of what is left out: most of its time."""
    size, generator = sampler.num_samples, sampler.generator
    yield from torch.randperm(size, generator=generator)[skip:].tolist()
    torch.randperm(size, generator=generator)  # of which torch takes as many as are missing: none


@cache
def _shuffles_alike() -> bool:
    """Return whether the installed torch shuffles as it did when this was written."""
    orders, states = [], []
    for iterate in (iter, partial(_shuffle, skip=0)):
        generator = torch.Generator().manual_seed(0)
        orders.append(list(iterate(RandomSampler(range(7), generator=generator))))
        states.append(generator.get_state().tolist())
    return orders[0] == orders[1] and states[0] == states[1]


def _exhaust(iterator: Iterator[Any]) -> None:
    deque(iterator, maxlen=0)


def iterate_apart(sampler: Iterable[Any], seed: int) -> Iterator[Any]:
    """Iterate over a sampler that draws from generators of its own, as far as it can tell."""
    iterator: Iterator[Any] | None = None
    own: RngState | None = None
    while True:
        main = capture_host_rng()
        try:
            if iterator is None or own is None:
                seed_host(seed)
                iterator = iter(sampler)
            else:
                restore_rng(own)
            item = next(iterator)
            own = capture_host_rng()
        except StopIteration:
            return
        finally:
            restore_rng(main)
        yield item
