"""A sampler that numbers batches and can continue within an epoch.

The seed of a batch depends on its position in the epoch. Its draws therefore depend neither on the
worker that loads it nor on earlier batches, and a resumed run does not load consumed batches again.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)
from torch.utils.data.distributed import DistributedSampler

from lightning_d9m.engine.control.seeding import RandomStreams, capture_host, restore_rng, seed_host
from lightning_d9m.program import is_of_framework


@dataclass(frozen=True, slots=True)
class SeededIndex:
    """A request of a loader to its dataset. Workers receive it, so it can be pickled."""

    indices: Any
    seed: int
    epoch: int

    def __len__(self) -> int:
        return len(self.indices)

    def __iter__(self) -> Iterator[Any]:
        # torch iterates over it to fetch a batch of an iterable dataset. In the main process such a
        # dataset draws from the generators of the training, which a checkpoint holds.
        if get_worker_info() is not None:
            seed_host(self.seed)
        return iter(self.indices)


class MicroBatches(list[Any]):
    """The micro-batches of consecutive logical ranks, in order of ranks."""


class MicroBatchIndices(list[Any]):
    """The indices of the micro-batches of consecutive logical ranks."""

    def __init__(self, indices: Sequence[Any], first: int) -> None:
        super().__init__(indices)
        self.first = first


class ResumableSampler:
    """Numbers and seeds the batches of a loader's sampler, for the iterators of the loader.

    Args:
        sampler: The user's batch sampler, or the sampler of a loader that does not batch.
        stream: The loader's random streams.
        user_made: True if a sampler comes from the user's code and may draw from the generators of
            the process. It then gets separate states of them, so that its order depends neither on
            the draws of training nor on how far workers prefetch.
        on_start: Called when an iterator is made.
    """

    def __init__(
        self,
        sampler: Any,
        stream: RandomStreams,
        *,
        user_made: bool,
        on_start: Callable[[], object],
    ) -> None:
        self._sampler = sampler
        self._stream = stream
        self._user_made = user_made
        self._on_start = on_start
        self.start_epoch()

    def start_epoch(self, skip: int = 0, cycled: Callable[[], bool] = bool) -> None:
        """Begin an epoch.

        Args:
            skip: Number of its batches that were consumed before.
            cycled: Returns whether the loader is iterated again within the epoch when it ends.
        """
        self._round, self._skip, self._cycled = 0, skip, cycled

    def __iter__(self) -> Iterator[SeededIndex | list[SeededIndex]]:
        self._on_start()
        return self._make_requests()

    def draw_skipped(self) -> None:
        """Draw the order of an epoch that was resumed at its end, if nothing has asked for it.

        The order of the next epoch may depend on it, as that of a sampler that counts its epochs.
        """
        if self._skip:
            self._begin_round()

    def _make_requests(self) -> Iterator[SeededIndex | list[SeededIndex]]:
        # A generator, because torch makes two iterators for new workers and uses only the second.
        begun = self._begin_round()
        if begun is None:
            return
        number, stream, batches, skipped = begun
        for place, indices in enumerate(batches, skipped):
            is_block = type(indices) is MicroBatchIndices  # of several logical ranks
            parts: Iterable[tuple[int, Any]] = [(stream.rank, indices)]
            if is_block:
                parts = enumerate(indices, indices.first)
            requests = [
                SeededIndex(
                    part,
                    replace(stream, rank=rank).derive("batch", index=f"{number}.{place}"),
                    stream.epoch,
                )
                for rank, part in parts
            ]
            yield requests if is_block else requests[0]

    def _begin_round(self) -> tuple[int, RandomStreams, Iterator[Any], int] | None:
        """Iterate the user's sampler, again after each round that was consumed before.

        Returns:
            The round, its streams, its batches that are left, and how many were skipped; None if no
            batch of the epoch is left.
        """
        while True:
            number = self._round
            # The epoch may change before the last batch is requested.
            stream = replace(self._stream, shared=None)
            # The same on all ranks, because the sampler may split one order among them.
            seed = stream.derive("sampler", index=number, shared=True)
            apart = self._user_made
            batches = iterate_apart(self._sampler, seed) if apart else iter(self._sampler)
            # Only the sampler runs; no batch is loaded.
            skipped = sum(1 for _ in islice(batches, self._skip))
            self._round, self._skip = number + 1, self._skip - skipped
            if not self._skip:
                return number, stream, batches, skipped
            if not self._cycled() or not skipped:
                self._skip = 0
                return None


def has_state(value: object) -> bool:
    """Return whether an object has a state that it can load."""
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def is_user_made(values: Iterable[Any]) -> bool:
    """Return whether a sampler or loader is not of torch, torchdata or Lightning.

    Such a sampler may draw from the generators of the process; those draw only from the generator
    that they are given.
    """
    modules = [type(value).__module__ for value in values]
    return not all(name == "builtins" or is_of_framework(name) for name in modules)


def iterate_apart(sampler: Iterable[Any], seed: int) -> Iterator[Any]:
    """Iterate over a sampler with separate states of the process's generators."""
    iterator: Any = None
    own = capture_host()
    while True:
        main = capture_host()
        try:
            if iterator is None:
                seed_host(seed)
                iterator = iter(sampler)
            else:
                restore_rng(own)
            item = next(iterator)
            own = capture_host()
        except StopIteration:
            return
        finally:
            restore_rng(main)
        yield item


# A loader has both `sampler` and `batch_sampler`, a batch sampler has `sampler`. Lightning's
# distributed wrapper has a `dataset` that has the user's sampler as `_sampler`.
_LINKS = ("sampler", "batch_sampler", "_sampler", "dataset")
# torch's samplers that do not depend on the rank. Any other may split one order among the ranks,
# and then needs the same order on all of them.
RANKLESS = (
    BatchSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)


def find_samplers(loader: Any) -> list[Any]:
    """Return a loader's samplers, outermost first, each once."""
    found: list[Any] = []
    pending = [loader]
    while pending:
        for _, sampler in _links(pending.pop(0)):
            if not any(sampler is other for other in found):
                found.append(sampler)
                pending.append(sampler)
    return found


def make_generator(sampler: Any) -> torch.Generator | None:
    """Return a new generator of the kind that a sampler draws from, or None.

    None if the sampler does not take a generator, or takes one of NumPy or of another kind.
    """
    if not hasattr(sampler, "generator"):
        return None
    present = sampler.generator
    if present is None:
        return torch.Generator()
    if isinstance(present, torch.Generator):
        return torch.Generator(device=present.device)
    return None


def copy_loader(loader: Any) -> Any:
    """Return a loader over the same dataset that does not share samplers, workers or control."""
    duplicate = _copy(loader, {})
    object.__setattr__(duplicate, "_iterator", None)
    vars(duplicate).pop("_get_iterator", None)
    return duplicate


def _copy(holder: Any, copies: dict[int, Any]) -> Any:
    if id(holder) not in copies:
        copies[id(holder)] = duplicate = copy.copy(holder)
        for name, sampler in _links(holder):
            object.__setattr__(duplicate, name, _copy(sampler, copies))
    return copies[id(holder)]


def _links(holder: Any) -> Iterator[tuple[str, Any]]:
    """Yield (name of attribute, sampler) for each sampler of ``holder``."""
    for name in _LINKS:
        kept = getattr(holder, name, None)
        if kept is None:
            continue
        # The dataset of Lightning's wrapper leads to a sampler.
        wraps = isinstance(holder, DistributedSampler) and hasattr(kept, "_sampler")
        if name != "dataset" or wraps:
            yield name, kept


def list_controlled(owner: Any) -> set[str]:
    """Return the attributes of a loader or sampler that are torch's, or set in each epoch."""
    if isinstance(owner, DataLoader):
        return {*vars(DataLoader(TensorDataset(torch.empty(1, device="cpu")))), "_get_iterator"}
    # What a sampler of a library draws from is data of the loader, which may be a long list.
    ours = set() if is_user_made([owner]) else {"data_source", "dataset"}
    ours |= {"seed"} if isinstance(owner, DistributedSampler) else set()
    ours |= {"epoch"} if hasattr(owner, "set_epoch") else set()
    return ours | ({"generator"} if make_generator(owner) is not None else set())
