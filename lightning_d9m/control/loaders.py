"""Loaders under control: order and workers depend on (seed, epoch) alone.

Knows torch's ``DataLoader``, not Lightning. Every attribute of the user's objects that is replaced
is put back by ``release``.
"""

import weakref
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, IterDataPipe
from torch.utils.data.distributed import DistributedSampler

from lightning_d9m.control.replacements import Replacements
from lightning_d9m.control.samplers import copy_loader, find_samplers, is_rankless, make_generator
from lightning_d9m.control.samples import SeededDataset, Stream, WorkerInit
from lightning_d9m.control.workers import drain_workers
from lightning_d9m.errors import SettingError

# torch adds the epoch to a DistributedSampler's seed; users' subclasses give the sum to generators
# of 32 bits.
_SAMPLER_SEED = 2**31


class LoaderControl:
    """The loaders of one fit.

    Args:
        seed: The base seed.
        fit: Ordinal of the fit in its process.
        rank: The data-parallel rank: workers of other ranks draw other numbers.
        per_sample_rng: Seed the generators for each sample by (seed, epoch, index), so that results
            do not depend on the number of workers.
    """

    def __init__(self, seed: int, *, fit: int, rank: int, per_sample_rng: bool) -> None:
        self._seed = seed
        self._fit = fit
        self._rank = rank
        self._per_sample_rng = per_sample_rng
        self._taken: list[_Taken] = []
        self._replacements = Replacements()

    def take_over(self, loader: Any, stage: str) -> Any:
        """Let a loader draw from streams of its own; return what to iterate.

        That is the loader itself, but for one that another stage has taken over already: it is
        copied, so that validation never changes what training draws. Loaders in lists, tuples,
        dicts and Lightning's ``CombinedLoader`` are found. Anything that is not torch's
        ``DataLoader`` is returned as it is: there is nothing of it to seed but the generators of
        the process. Call ``start_epoch`` before it is iterated.

        Args:
            loader: What is iterated for batches.
            stage: ``"train"``, ``"validate"``, ``"test"`` or ``"predict"``.

        Raises:
            SettingError: When a seed for each sample is asked of a dataset without indices.
        """
        if isinstance(loader, DataLoader):
            return self._take(loader, stage)
        if isinstance(loader, Mapping):
            taken = {key: self.take_over(value, stage) for key, value in loader.items()}
            same = all(taken[key] is loader[key] for key in taken)
            return loader if same else taken
        if isinstance(loader, list | tuple):
            items = [self.take_over(item, stage) for item in loader]
            same = all(new is old for new, old in zip(items, loader, strict=True))
            return loader if same else items
        flattened = getattr(loader, "flattened", None)
        if isinstance(flattened, list):
            items = self.take_over(flattened, stage)
            if items is not flattened:
                self._replacements.replace(loader, "flattened", items)
        return loader

    def start_epoch(self, stage: str, epoch: int) -> None:
        """Seed the streams of a stage's loaders for an epoch.

        An epoch that has been started is not started again: its order may be drawn already.
        """
        present = [taken for taken in self._taken if taken.stage == stage]
        for taken in present:
            if taken.first_epoch is None:
                # Counted among those that were loaded together, so that a loader which is loaded
                # anew every epoch draws the same, whether or not the run was resumed before it.
                taken.number(sum(other.first_epoch == epoch for other in present), epoch)
            taken.start_epoch(epoch)

    def restart(self, stage: str) -> None:
        """Let a stage's loaders start their epoch anew: what they drew in it counts for nothing."""
        for taken in self._taken:
            if taken.stage == stage:
                taken.started = None

    def release(self) -> None:
        """Put back every attribute that was replaced, in reverse."""
        self._taken.clear()
        self._replacements.undo()

    def _take(self, loader: Any, stage: str) -> Any:
        # Loaders that are loaded anew every epoch must not be kept alive.
        self._taken = [taken for taken in self._taken if taken.loader() is not None]
        for taken in self._taken:
            if taken.loader() is loader:
                if taken.stage == stage:
                    taken.started = None  # it is about to be iterated from the beginning
                    return loader
                loader = _copy_original(loader)
                break
        stream = Stream(self._seed, self._fit, self._rank, stage)
        taken = _Taken(loader, stream, self._replacements, per_sample=self._per_sample_rng)
        self._taken.append(taken)
        return loader


class _Taken:
    """One loader under control."""

    def __init__(
        self, loader: Any, stream: Stream, replacements: Replacements, *, per_sample: bool
    ) -> None:
        self.loader = weakref.ref(loader)
        self.stage = stream.stage
        self.started: int | None = None
        self.first_epoch: int | None = None
        self._stream = stream
        self._replacements = replacements
        iterable = isinstance(loader.dataset, IterableDataset)
        if per_sample and iterable:
            raise SettingError(
                f"per_sample_rng is on and {type(loader.dataset).__name__} is an IterableDataset: "
                "its samples have no index to seed them by. Use a dataset with indices, or switch "
                "per_sample_rng off; runs with one number of workers are exact without it."
            )
        # The base seed of the workers is drawn from here, not from the generator of the training.
        self._generator = torch.Generator()
        self._orders: dict[int, torch.Generator] = {}
        self._rankless = is_rankless(loader)
        replacements.replace(loader, "generator", self._generator)
        if loader.num_workers > 0:
            init = WorkerInit(stream, loader.worker_init_fn)
            replacements.replace(loader, "worker_init_fn", init)
        lives_on = loader.num_workers > 0 and loader.persistent_workers
        if lives_on:
            stream.shared = torch.zeros(1, dtype=torch.int64).share_memory_()
            # Workers that live already know nothing of these streams: new ones are started.
            replacements.replace(loader, "_iterator", None)
        self._drained = lives_on and not iterable
        # torch itself seeds a data pipe anew in every epoch, and takes it apart to do so.
        if per_sample or (lives_on and not isinstance(loader.dataset, IterDataPipe)):
            seeded = SeededDataset(loader.dataset, stream, per_sample)
            replacements.replace(loader, "dataset", seeded)

    def number(self, number: int, epoch: int) -> None:
        """Number the loader among those whose first epoch is the same."""
        self.first_epoch = epoch
        self._stream.number = number

    def start_epoch(self, epoch: int) -> None:
        loader = self.loader()
        if loader is None or epoch == self.started:
            return
        self.started = epoch
        if self._drained:
            drain_workers(loader)
        self._stream.start_epoch(epoch)
        seed = self._stream.derive("workers")
        self._generator.manual_seed(seed)
        # As torch draws it; see `WorkerInit`.
        drawn = torch.empty((), dtype=torch.int64).random_(generator=self._generator)
        self._stream.workers = int(drawn)
        self._generator.manual_seed(seed)
        self._seed_samplers(loader, epoch)

    def _seed_samplers(self, loader: Any, epoch: int) -> None:
        for number, sampler in enumerate(find_samplers(loader)):
            if isinstance(sampler, DistributedSampler):
                # All ranks must cut one and the same permutation.
                seed = self._stream.derive("shards", worker=number, shared=True)
                self._replacements.replace(sampler, "seed", seed % _SAMPLER_SEED)
                continue
            generator = self._orders.get(number) or make_generator(sampler)
            if generator is None:
                continue
            self._orders[number] = generator
            # Again in every epoch: another stage's loader may hold the same sampler.
            with suppress(AttributeError):  # one that does not let it be set keeps its own
                self._replacements.replace(sampler, "generator", generator)
            shared = not self._rankless
            generator.manual_seed(self._stream.derive("order", worker=number, shared=shared))
        # Lightning says the epoch only after it has made the iterator, whose workers may have been
        # given the order of epoch 0 by then: so a resumed run would see that again.
        for sampler in (loader.sampler, getattr(loader.batch_sampler, "sampler", None)):
            if callable(set_epoch := getattr(sampler, "set_epoch", None)):
                if "epoch" in getattr(sampler, "__dict__", ()):
                    self._replacements.replace(sampler, "epoch", epoch)
                set_epoch(epoch)


def _copy_original(loader: Any) -> Any:
    """Copy a loader that has been taken over, as it was before."""
    twin = copy_loader(loader)
    if isinstance(twin.worker_init_fn, WorkerInit):
        twin.worker_init_fn = twin.worker_init_fn.users
    if type(twin.dataset) is SeededDataset:
        object.__setattr__(twin, "dataset", vars(twin.dataset)["_dataset"])
    return twin
