"""Loaders under control: order and workers depend on (seed, epoch) alone.

Knows torch's ``DataLoader``, not Lightning. Every attribute of the user's objects that is replaced
is put back by ``release``.
"""

import warnings
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, IterDataPipe
from torch.utils.data.distributed import DistributedSampler

from lightning_d9m.control.attribute_patches import AttributePatches
from lightning_d9m.control.generators import capture_generators, restore_generators
from lightning_d9m.control.random_streams import Stream
from lightning_d9m.control.resumable_sampler import ResumableSampler, is_foreign, unwrap
from lightning_d9m.control.samplers import copy_loader, find_samplers, is_rankless, make_generator
from lightning_d9m.control.seeded_dataset import (
    NoRngGuard,
    RngGuard,
    SeededCollate,
    SeededDataset,
    WorkerInit,
    draws_nothing,
)
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
        per_sample_rng: Seed the generators for each sample by (seed, epoch, index), so that what it
            draws does not depend on the batch that it is in, nor on the rank.
    """

    def __init__(self, seed: int, *, fit: int, rank: int, per_sample_rng: bool) -> None:
        self._seed = seed
        self._fit = fit
        self._rank = rank
        self._per_sample_rng = per_sample_rng
        self._taken: list[_ControlledLoader] = []
        self._replacements = AttributePatches()
        self._consumed: dict[str, _Consumed] = {}

    def resume(self, fit: int) -> None:
        """Draw what another process's fit would draw; before any loader is taken over."""
        self._fit = fit

    def resume_epoch(
        self,
        stage: str,
        epoch: int,
        *,
        batches: int,
        cycled: Callable[[], bool],
        samplers: Mapping[str, Any] | None = None,
    ) -> None:
        """Go on within an epoch, whose first batches were consumed; before it is started.

        Args:
            stage: Whose loaders.
            epoch: The epoch.
            batches: How many batches each loader has given.
            cycled: Whether a loader that ends before the epoch does is iterated anew.
            samplers: What ``capture_samplers`` gave.
        """
        self._consumed[stage] = _Consumed(epoch, batches, cycled, samplers or {})

    def capture_samplers(self, stage: str, *, within: bool) -> dict[str, Any]:
        """Return the states of the generators that samplers of the user's keep for themselves.

        Args:
            stage: Whose loaders.
            within: Whether an epoch is under way. Its order is drawn from the states that it began
                with, so these are what it is resumed from.

        Returns:
            Plain values.
        """
        return {
            str(taken.number): taken.at_start if within else taken.capture_samplers()
            for taken in self._taken
            if taken.stage == stage and taken.at_start
        }

    def wrap_loader(self, loader: Any, stage: str) -> Any:
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
            taken = {key: self.wrap_loader(value, stage) for key, value in loader.items()}
            same = all(taken[key] is loader[key] for key in taken)
            return loader if same else taken
        if isinstance(loader, list | tuple):
            items = [self.wrap_loader(item, stage) for item in loader]
            same = all(new is old for new, old in zip(items, loader, strict=True))
            return loader if same else items
        flattened = getattr(loader, "flattened", None)
        if isinstance(flattened, list):
            items = self.wrap_loader(flattened, stage)
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
                taken.enter(sum(other.first_epoch == epoch for other in present), epoch)
            taken.start_epoch(epoch, self._consumed.get(stage))

    def restart(self, stage: str) -> None:
        """Let a stage's loaders start their epoch anew: what they drew in it counts for nothing."""
        for taken in self._taken:
            if taken.stage == stage:
                taken.started = None

    def restart_epoch(self, stage: str, epoch: int) -> None:
        """Start an epoch again: a stage's loaders are about to be iterated anew from its beginning.

        Workers may have been given batches of an iteration that nothing was taken from.
        """
        for taken in self._taken:
            if taken.stage == stage:
                taken.unwrap_loader(epoch)
        self.start_epoch(stage, epoch)

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
        taken = _ControlledLoader(
            loader, stream, self._replacements, per_sample=self._per_sample_rng
        )
        self._taken.append(taken)
        return loader


@dataclass(frozen=True)
class _Consumed:
    """How far an epoch had got when its run was interrupted."""

    epoch: int
    batches: int
    cycled: Callable[[], bool]
    samplers: Mapping[str, Any]


class _ControlledLoader:
    """One loader under control."""

    def __init__(
        self, loader: Any, stream: Stream, replacements: AttributePatches, *, per_sample: bool
    ) -> None:
        self.loader = weakref.ref(loader)
        self.stage = stream.stage
        self.started: int | None = None
        self.first_epoch: int | None = None
        self._stream = stream
        self._replacements = replacements
        self._iterable = iterable = isinstance(loader.dataset, IterableDataset)
        if per_sample and iterable:
            raise SettingError(
                f"per_sample_rng is on and {type(loader.dataset).__name__} is an IterableDataset: "
                "its samples have no index to seed them by. Use a dataset with indices, or switch "
                "per_sample_rng off; runs are exact without it."
            )
        # The base seed of the workers is drawn from here, not from the generator of the training.
        self._generator = torch.Generator()
        self._orders: dict[int, torch.Generator] = {}
        self._rankless = is_rankless(loader)
        replacements.replace(loader, "generator", self._generator)
        # With in_order=False batches come as workers finish them. torchdata's loaders and older
        # releases of torch may lack the attribute.
        if not getattr(loader, "in_order", True):
            warnings.warn(
                "A DataLoader has in_order=False, which gives batches as the workers finish them. "
                "It gives them in order while this run lasts; remove in_order=False.",
                stacklevel=2,
            )
            replacements.replace(loader, "in_order", value=True)
        if loader.num_workers > 0:
            init = WorkerInit(stream, loader.worker_init_fn)
            replacements.replace(loader, "worker_init_fn", init)
            if loader.persistent_workers:
                # Workers that live already know nothing of these streams: new ones are started.
                replacements.replace(loader, "_iterator", None)
                if iterable:
                    stream.shared = torch.zeros(1, dtype=torch.int64).share_memory_()
        self.at_start: dict[str, Any] = {}
        self._foreign = is_foreign(find_samplers(loader))
        users = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        still = draws_nothing(loader)
        self._requests = ResumableSampler(users, stream, foreign=self._foreign, still=still)
        batching = loader.batch_sampler is not None
        replacements.replace(loader, "batch_sampler" if batching else "sampler", self._requests)
        if not iterable:
            if hasattr(loader, "load_state_dict"):
                # torchdata's: the place in the epoch is found here.
                replacements.replace(loader, "load_state_dict", _ignore)
            apart = NoRngGuard() if still else RngGuard()
            seeded = SeededDataset(loader.dataset, stream, per_sample and not still, apart)
            replacements.replace(loader, "dataset", seeded)
            replacements.replace(loader, "collate_fn", SeededCollate(loader.collate_fn, apart))
        # torch itself seeds a data pipe anew in every epoch, and takes it apart to do so.
        elif stream.shared is not None and not isinstance(loader.dataset, IterDataPipe):
            seeded = SeededDataset(loader.dataset, stream, per_sample, RngGuard())
            replacements.replace(loader, "dataset", seeded)

    @property
    def number(self) -> int:
        """Ordinal of the loader in its stage."""
        return self._stream.number

    def capture_samplers(self) -> dict[str, Any]:
        """Return the states of the generators that samplers of the user's keep for themselves."""
        return capture_generators(self._owners())

    def _owners(self) -> dict[str, object]:
        loader = self.loader()
        samplers = [] if loader is None or not self._foreign else find_samplers(loader)
        return {str(number): sampler for number, sampler in enumerate(samplers)}

    def unwrap_loader(self, epoch: int) -> None:
        """Forget what samplers have drawn in an epoch that was started."""
        if self.started == epoch:
            restore_generators(self._owners(), self.at_start)
            self.started = None

    def enter(self, number: int, epoch: int) -> None:
        """Number the loader among those whose first epoch is the same."""
        self.first_epoch = epoch
        self._stream.number = number

    def start_epoch(self, epoch: int, consumed: _Consumed | None) -> None:
        loader = self.loader()
        if loader is None or epoch == self.started:
            return
        self.started = epoch
        self._stream.start_epoch(epoch)
        seed = self._stream.derive("workers")
        self._generator.manual_seed(seed)
        if loader.num_workers > 0:
            # As torch draws it; see `WorkerInit`.
            drawn = torch.empty((), dtype=torch.int64).random_(generator=self._generator)
            self._stream.workers = int(drawn)
            self._generator.manual_seed(seed)
        resumed = consumed is not None and consumed.epoch == epoch
        if consumed is not None and resumed:
            restore_generators(self._owners(), consumed.samplers.get(str(self.number), {}))
        self._seed_samplers(loader, epoch)
        self.at_start = self.capture_samplers()
        # A loader of an iterable dataset finds its place by itself, or not at all.
        if consumed is not None and resumed and not self._iterable:
            self._requests.start_epoch(consumed.batches, consumed.cycled)
        else:
            self._requests.start_epoch()

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
        if self.stage != "train":
            return  # Lightning calls `set_epoch` before it iterates the loader of an evaluation
        # In training Lightning calls it only after it has made the iterator, whose workers may have
        # received the order of epoch 0 by then; a resumed run would see that order again.
        inner = getattr(loader.batch_sampler, "sampler", None)
        holders: tuple[Any, ...] = (unwrap(loader.sampler), inner)
        for sampler in {id(sampler): sampler for sampler in holders}.values():
            if callable(set_epoch := getattr(sampler, "set_epoch", None)):
                if "epoch" in getattr(sampler, "__dict__", ()):
                    if sampler.epoch == epoch:
                        continue
                    self._replacements.replace(sampler, "epoch", epoch)
                set_epoch(epoch)


def _ignore(state: object) -> None:
    """Leave out what is known already."""


def _copy_original(loader: Any) -> Any:
    """Copy a loader that has been taken over, as it was before."""
    twin = copy_loader(loader)
    if isinstance(twin.worker_init_fn, WorkerInit):
        twin.worker_init_fn = twin.worker_init_fn.users
    if type(twin.collate_fn) is SeededCollate:
        twin.collate_fn = twin.collate_fn.users
    if type(twin.dataset) is SeededDataset:
        object.__setattr__(twin, "dataset", vars(twin.dataset)["_dataset"])
    return twin
