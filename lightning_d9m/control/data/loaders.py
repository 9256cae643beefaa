"""Controlled loaders, whose order and workers depend only on (seed, epoch).

This module knows torch's ``DataLoader``, not Lightning. ``release`` restores every replaced
attribute of the user's objects.
"""

import os
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, IterDataPipe
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter
from torch.utils.data.distributed import DistributedSampler

from lightning_d9m.attribute_patches import AttributePatches
from lightning_d9m.control.data.data_state import DATA, LOADER, LOGGED_DATA, UNSAVED_DATA, DataState
from lightning_d9m.control.data.resumable_sampler import (
    ResumableSampler,
    copy_loader,
    find_samplers,
    is_rankless,
    is_user_made,
    make_generator,
)
from lightning_d9m.control.data.seeded_dataset import SeededDataset, init_worker, return_batch
from lightning_d9m.control.seeding import RandomStreams
from lightning_d9m.errors import SettingError
from lightning_d9m.state.parts import is_of_program

# torch adds the epoch to a DistributedSampler's seed, and subclasses of users may pass the sum to
# generators with 32-bit seeds.
_SAMPLER_SEED = 2**31
_OF_DATA = (DATA, UNSAVED_DATA, LOGGED_DATA)


@dataclass(frozen=True)
class ReachedPosition:
    """The position in an epoch at which its run was interrupted."""

    epoch: int
    batches: int
    cycled: Callable[[], bool]
    samplers: Mapping[str, Any]


class ControlledLoader:
    """The parts of a loader that are replaced, and where an interrupted epoch continues."""

    def __init__(
        self,
        loader: Any,
        stream: RandomStreams,
        replacements: AttributePatches,
        *,
        per_sample: bool,
        host_sets_epochs: bool,
        earlier: Iterable["ControlledLoader"],
    ) -> None:
        self.loader = weakref.ref(loader)
        self.stage = stream.stage
        self.started: int | None = None
        self.first_epoch: int | None = None
        self.stream = stream
        self._replacements = replacements
        self._iterable = iterable = isinstance(loader.dataset, IterableDataset)
        if per_sample and iterable:
            raise SettingError(
                f"per_sample_rng is on and {type(loader.dataset).__name__} is an IterableDataset: "
                "its samples have no index to seed them by. Use a dataset with indices, or switch "
                "per_sample_rng off; runs are exact without it."
            )
        # torch draws the base seed of the workers from this generator.
        self._generator = torch.Generator()
        self._orders: dict[int, torch.Generator] = {}
        self._chosen: dict[int, str] = {}  # what the user's seeds add to ours
        self._rankless = is_rankless(loader)
        samplers = find_samplers(loader)
        states = [control.state for control in earlier]
        owners: dict[str, object] = {LOADER: loader} if is_of_program(type(loader)) else {}
        # Persistent workers have a copy of a dataset with indices, which changes of the program do
        # not reach.
        if iterable or not (loader.num_workers and loader.persistent_workers):
            owners |= {"dataset": loader.dataset, "collate_fn": loader.collate_fn}
        self.state: DataState = DataState(owners, samplers, states)
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
            stream.share(persistent=loader.persistent_workers and iterable)
            if loader.persistent_workers:
                # Running workers do not have these streams, so torch must start new ones.
                replacements.replace(loader, "_iterator", None)
        self._per_sample = per_sample
        self._host_sets_epochs = host_sets_epochs
        self._has_data = False
        # The states where the epoch was first iterated, and after it was iterated in advance.
        self.start: dict[str, Any] | None = None
        self.after: dict[str, Any] | None = None
        self._place = "sampler" if loader.batch_sampler is None else "batch_sampler"
        self._requests = ResumableSampler(
            getattr(loader, self._place),
            stream,
            user_made=is_user_made(samplers),
            # torch makes this iterator first, and then that of the dataset.
            on_start=self._keep_start,
        )
        if not iterable and hasattr(loader, "load_state_dict"):
            # torchdata's loader, which then ignores it; this class restores the position.
            replacements.replace(loader, "load_state_dict", bool)
        replacements.replace(loader, "_get_iterator", self._make_iterator)

    def _make_iterator(self) -> Any:
        """Make an iterator of the loader, which then has our parts; the user's stay in the loader.

        Only torch's iterators read these parts, and only when they are made.
        """
        loader: Any = self.loader()
        stream, dataset, workers = self.stream, loader.dataset, loader.num_workers > 0
        parts: dict[str, Any] = {self._place: self._requests}
        if workers:
            given = (stream, loader.worker_init_fn, self.start is None)
            parts["worker_init_fn"] = partial(init_worker, *given)
        if not self._iterable:
            state = None if workers else self.state
            seeded = SeededDataset(dataset, stream, self._per_sample, loader.collate_fn, state)
            parts |= {"dataset": seeded, "collate_fn": return_batch}
        # torch itself seeds a data pipe in every epoch, and traverses it to do so.
        elif stream.shared is not None and not isinstance(dataset, IterDataPipe):
            parts["dataset"] = SeededDataset(dataset, stream)
        patches = AttributePatches()
        try:
            for name, part in parts.items():
                patches.replace(loader, name, part)
            return type(loader)._get_iterator(loader)  # noqa: SLF001 - torch calls it by this name
        finally:
            patches.undo()

    @property
    def is_bypassed(self) -> bool:
        """Whether the loader's epoch has begun without an iterator of torch."""
        return self.started is not None and self.start is None

    def capture(self, *, within: bool, at_end: bool) -> dict[str, Any]:
        """Return what the order of batches depends on; see ``LoaderControl.capture_samplers``."""
        start = self.start
        if not within or start is None:
            return self.state.capture()
        # Read again from the start of the epoch; a validation is run again as a whole.
        if (self._iterable or self.stage != "train") and not at_end:
            return start
        at_start = {name: own for name, own in start.items() if name not in _OF_DATA}
        now = {name: own for name, own in self.state.capture().items() if name in _OF_DATA}
        loader = self.loader()
        if loader is not None and loader.num_workers and not at_end:
            # Workers have copies from the start of the epoch.
            first = start.get(DATA, {})
            changed = [
                path
                for path, own in now.get(DATA, {}).items()
                if path not in first or not torch.equal(own, first[path])
            ]
            now = {**now, UNSAVED_DATA: [*now.get(UNSAVED_DATA, ()), *changed]}
        return at_start | {name: own for name, own in now.items() if own}

    def _keep_start(self) -> None:
        if self.start is None:  # torch may make a second iterator, or cycle
            self.start = self.state.capture()

    def restore_data(self, epoch: int, consumed: ReachedPosition | None) -> None:
        """Restore what the dataset held where the run was interrupted."""
        if consumed is not None and consumed.epoch == epoch:
            self.state.restore_data(consumed.samplers.get(str(self.stream.number), {}))
            self._has_data = True

    def start_epoch(self, epoch: int, consumed: ReachedPosition | None) -> None:
        """Seed the order and the workers of an epoch; continue it where it was interrupted."""
        loader = self.loader()
        if loader is None or epoch == self.started:
            return
        self._requests.draw_skipped()
        self.started = epoch
        self.start = self.after = None
        self.stream.start_epoch(epoch)
        self._generator.manual_seed(self.stream.derive("workers"))
        resumed = consumed is not None and consumed.epoch == epoch
        if consumed is not None and resumed:
            self.state.restore_samplers(consumed.samplers.get(str(self.stream.number), {}))
            if not self._has_data:  # otherwise hooks may have set it since
                self.restore_data(epoch, consumed)
        self._seed_samplers(loader, epoch)
        # A loader of an iterable dataset restores its position itself, or cannot.
        if consumed is not None and resumed and not self._iterable:
            self._requests.start_epoch(consumed.batches, consumed.cycled)
        else:
            self._requests.start_epoch()

    def _seed_samplers(self, loader: Any, epoch: int) -> None:
        for number, sampler in enumerate(find_samplers(loader)):
            chosen = self._chosen.setdefault(number, self._read_seed(sampler))
            if isinstance(sampler, DistributedSampler):
                # All ranks must split the same permutation.
                seed = self.stream.derive(f"shards{chosen}", worker=number, shared=True)
                self._replacements.replace(sampler, "seed", seed % _SAMPLER_SEED)
                continue
            generator = self._orders.get(number) or make_generator(sampler)
            if generator is None:
                continue
            self._orders[number] = generator
            # In every epoch, because another stage's loader may hold the same sampler.
            with suppress(AttributeError):  # a read-only attribute keeps its value
                self._replacements.replace(sampler, "generator", generator)
            shared = not self._rankless
            seed = self.stream.derive(f"order{chosen}", worker=number, shared=shared)
            generator.manual_seed(seed)
        # Workers may receive the order of epoch 0 before Lightning sets the epoch; a resumed run
        # would see that order again.
        if self.stage != "train" or (self._host_sets_epochs and not loader.num_workers):
            return
        inner = getattr(loader.batch_sampler, "sampler", None)
        holders: tuple[Any, ...] = (loader.sampler, inner)
        for sampler in {id(sampler): sampler for sampler in holders}.values():
            if callable(set_epoch := getattr(sampler, "set_epoch", None)):
                if "epoch" in getattr(sampler, "__dict__", ()):
                    if sampler.epoch == epoch:
                        continue
                    self._replacements.replace(sampler, "epoch", epoch)
                set_epoch(epoch)

    def _read_seed(self, sampler: Any) -> str:
        """Return what the user's own seed of a sampler adds to the names of our streams.

        Lightning gives its ``DistributedSampler`` the seed of ``PL_GLOBAL_SEED``, which is ours.
        """
        split = isinstance(sampler, DistributedSampler)
        seed = self._replacements.read_original(sampler, "seed" if split else "generator")
        if not split:
            seed = seed.initial_seed() if isinstance(seed, torch.Generator) else None
        defaults = (None, 0, torch.Generator().initial_seed())
        given = seed not in defaults and str(seed) != os.environ.get("PL_GLOBAL_SEED")
        return f" {seed}" if given else ""


@dataclass(eq=False)
class LoaderControl:
    """The loaders of one fit.

    Attributes:
        seed: The base seed.
        fit: Ordinal of the fit in its process. A resumed one sets it before any ``wrap_loader``.
        rank: The data-parallel rank; workers of different ranks draw different numbers.
        per_sample_rng: Seed the generators for each sample by (seed, epoch, index), so that its
            draws depend neither on its batch nor on the rank.
        host_sets_epochs: Whether the program that iterates the training loaders calls
            ``set_epoch`` between making an iterator and its first batch, as Lightning does.
    """

    seed: int
    _: KW_ONLY
    fit: int
    rank: int
    per_sample_rng: bool
    host_sets_epochs: bool = False

    def __post_init__(self) -> None:
        self._controlled: list[ControlledLoader] = []
        self._replacements = AttributePatches()
        self._consumed: dict[str, ReachedPosition] = {}
        # Loaders that are not torch's.
        self._others: list[tuple[str, object, DataState]] = []

    def resume_epoch(
        self,
        stage: str,
        epoch: int,
        *,
        batches: int,
        cycled: Callable[[], bool],
        samplers: Mapping[str, Any] | None = None,
    ) -> None:
        """Continue an epoch after its first batches. Call it before the epoch starts.

        Each loader has given ``batches`` of them. ``cycled`` returns whether a loader that
        ends before the epoch is iterated again; ``samplers`` is what ``capture_samplers``
        returned.
        """
        self._consumed[stage] = ReachedPosition(epoch, batches, cycled, samplers or {})

    def capture_samplers(self, stage: str, *, within: bool, at_end: bool = False) -> dict[str, Any]:
        """Return what the order of batches depends on beside the random streams.

        That is what the user's samplers have changed, the states of their generators, and the
        numbers among the attributes of datasets, if they have changed.

        Args:
            stage: The stage of the loaders.
            within: True within an epoch: return the states of samplers at its start, from which its
                order was drawn.
            at_end: True if no batch of the epoch is left.

        Returns:
            Plain values.
        """
        found = {
            str(control.stream.number): control.capture(within=within, at_end=at_end)
            for control in self._list(stage)
        }
        others = [state for other, _, state in self._others if other == stage]
        found |= {f"{LOADER}{n}": state.capture() for n, state in enumerate(others)}
        return {number: states for number, states in found.items() if states}

    def _list(self, stage: str) -> list[ControlledLoader]:
        return [control for control in self._controlled if control.stage == stage]

    def wrap_loader(self, loader: Any, stage: str) -> Any:
        """Give a loader its own random streams; return the loader to iterate.

        Returns the loader itself, or a copy if another stage already controls it, so that
        validation never changes the draws of training. Returns any object that is not a
        ``DataLoader`` unchanged: only the generators of the process affect it. Call
        ``start_epoch`` before you iterate.

        Raises:
            SettingError: If per_sample_rng is on and the dataset does not have indices.
        """
        if not isinstance(loader, DataLoader):
            if is_of_program(type(loader)) and all(loader is not own for _, own, _ in self._others):
                self._others.append((stage, loader, DataState({LOADER: loader})))
            return loader
        # Do not keep loaders alive that are reloaded every epoch.
        earlier = self._controlled
        self._controlled = [control for control in earlier if control.loader() is not None]
        for control in self._controlled:
            if control.loader() is loader:
                if control.stage == stage:
                    control.started = None  # it is iterated from the beginning next
                    return loader
                loader = copy_loader(loader)
                break
        stream = RandomStreams(self.seed, self.fit, self.rank, stage)
        control = ControlledLoader(
            loader,
            stream,
            self._replacements,
            per_sample=self.per_sample_rng,
            host_sets_epochs=self.host_sets_epochs,
            earlier=earlier,
        )
        self._controlled.append(control)
        return loader

    def start_epoch(self, stage: str, epoch: int) -> None:
        """Seed the streams of a stage's loaders for an epoch.

        Does not start the same epoch twice, because its order may be drawn already.
        """
        present = self._list(stage)
        for control in present:
            if control.first_epoch is None:
                # Numbered among the loaders of the same first epoch, so that a loader that is
                # reloaded every epoch draws the same in a resumed run.
                control.stream.number = sum(other.first_epoch == epoch for other in present)
                control.first_epoch = epoch
            control.start_epoch(epoch, self._consumed.get(stage))

    def restore_data(self, stage: str, epoch: int) -> None:
        """Restore the state of datasets, which an iteration before the epoch may have changed."""
        for control in self._list(stage):
            control.restore_data(epoch, self._consumed.get(stage))

    def restore_samplers(self, stage: str, samplers: Mapping[str, Any]) -> None:
        """Restore what ``capture_samplers`` returned, after the loaders were loaded."""
        for control in self._list(stage):
            states = samplers.get(str(control.stream.number), {})
            control.state.restore_samplers(states)
            control.state.restore_data(states)

    def keep_iterated(self, stage: str) -> None:
        """Note that a stage's loaders were iterated in advance, as ``restart_epoch`` may undo."""
        for control in self._list(stage):
            if control.start is not None:
                control.after = control.state.capture()

    def restart(self, stage: str) -> None:
        """Let the next ``start_epoch`` of a stage start the same epoch again."""
        for control in self._list(stage):
            control.started = None

    def restart_epoch(self, stage: str, epoch: int) -> None:
        """Start an epoch again, before a stage's loaders are iterated again from its beginning.

        Workers may already hold batches of an iteration that was not consumed.
        """
        for control in self._list(stage):
            if control.started == epoch:
                if control.start is not None:  # but for what hooks have set
                    control.state.undo(control.start, control.after or {})
                control.started = None
        self.start_epoch(stage, epoch)

    def release(self) -> None:
        """Restore every replaced attribute in reverse order, and stop persistent workers."""
        for control in self._controlled:
            # The traceback of an error may otherwise keep them alive.
            iterator = getattr(control.loader(), "_iterator", None)
            if isinstance(iterator, _MultiProcessingDataLoaderIter):
                iterator._shutdown_workers()  # noqa: SLF001 - the only way
        self._controlled.clear()
        self._replacements.undo()
