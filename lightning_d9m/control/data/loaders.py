"""Controlled loaders, whose order and workers depend only on (seed, epoch).

This module knows torch's ``DataLoader``, not Lightning. ``release`` restores every replaced
attribute of the user's objects.
"""

import warnings
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, IterDataPipe
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter
from torch.utils.data.distributed import DistributedSampler

from lightning_d9m.attribute_patches import AttributePatches
from lightning_d9m.control.data.dataset_numbers import (
    Numbers,
    find_changed,
    read_numbers,
    write_numbers,
)
from lightning_d9m.control.data.resumable_sampler import ResumableSampler, is_foreign, unwrap
from lightning_d9m.control.data.samplers import (
    copy_loader,
    find_samplers,
    is_rankless,
    make_generator,
)
from lightning_d9m.control.data.seeded_dataset import (
    NoRngGuard,
    RngGuard,
    SeededCollate,
    SeededDataset,
    WorkerInit,
    draws_nothing,
)
from lightning_d9m.control.generators import capture_generators, restore_generators
from lightning_d9m.control.random_streams import RandomStreams
from lightning_d9m.errors import SettingError

# torch adds the epoch to a DistributedSampler's seed, and subclasses of users may pass the sum to
# generators with 32-bit seeds.
_SAMPLER_SEED = 2**31

NUMBERS = "dataset numbers"
"""The key of the numbers of a loader's dataset, beside the states of its samplers' generators."""


class LoaderControl:
    """The loaders of one fit.

    Args:
        seed: The base seed.
        fit: Ordinal of the fit in its process.
        rank: The data-parallel rank; workers of different ranks draw different numbers.
        per_sample_rng: Seed the generators for each sample by (seed, epoch, index), so that its
            draws depend neither on its batch nor on the rank.
        host_sets_epochs: Whether the program that iterates the training loaders calls
            ``set_epoch`` between making an iterator and its first batch, as Lightning does.
    """

    def __init__(
        self,
        seed: int,
        *,
        fit: int,
        rank: int,
        per_sample_rng: bool,
        host_sets_epochs: bool = False,
    ) -> None:
        self._host_sets_epochs = host_sets_epochs
        self._seed = seed
        self._fit = fit
        self._rank = rank
        self._per_sample_rng = per_sample_rng
        self._controlled: list[_ControlledLoader] = []
        self._replacements = AttributePatches()
        self._consumed: dict[str, _Consumed] = {}
        # The numbers of each iterable dataset before it was first iterated.
        self._first_numbers: list[tuple[weakref.ref[Any], Numbers]] = []

    def resume(self, fit: int) -> None:
        """Draw the same as a fit of another process. Call it before any ``wrap_loader``."""
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
        """Continue an epoch after its first batches. Call it before the epoch starts.

        Args:
            stage: The stage of the loaders.
            epoch: The epoch.
            batches: Number of batches that each loader has given.
            cycled: Returns whether a loader that ends before the epoch is iterated again.
            samplers: The result of ``capture_samplers``.
        """
        self._consumed[stage] = _Consumed(epoch, batches, cycled, samplers or {})

    def capture_samplers(self, stage: str, *, within: bool) -> dict[str, Any]:
        """Return what the order of batches depends on beside the random streams.

        These are the states of the generators that the user's samplers hold, and the numbers that
        an iterable dataset has changed.

        Args:
            stage: The stage of the loaders.
            within: True within an epoch: return the states at its start, from which its order was
                drawn.

        Returns:
            Plain values.
        """
        found = {
            str(control.number): control.at_start if within else control.capture_samplers()
            for control in self._controlled
            if control.stage == stage
        }
        return {number: states for number, states in found.items() if states}

    def wrap_loader(self, loader: Any, stage: str) -> Any:
        """Give a loader its own random streams; return the loader to iterate.

        Returns the loader itself, or a copy if another stage already controls it, so that
        validation never changes the draws of training. Finds loaders in lists, tuples, dicts and
        Lightning's ``CombinedLoader``. Returns any object that is not a ``DataLoader`` unchanged:
        only the generators of the process affect it. Call ``start_epoch`` before you iterate.

        Args:
            loader: An iterable of batches, or a container of such.
            stage: ``"train"``, ``"validate"``, ``"test"`` or ``"predict"``.

        Raises:
            SettingError: If per_sample_rng is on and the dataset does not have indices.
        """
        if isinstance(loader, DataLoader):
            return self._control(loader, stage)
        if isinstance(loader, Mapping):
            wrapped = {key: self.wrap_loader(value, stage) for key, value in loader.items()}
            same = all(wrapped[key] is loader[key] for key in wrapped)
            return loader if same else wrapped
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

        Does not start the same epoch twice, because its order may be drawn already.
        """
        present = [control for control in self._controlled if control.stage == stage]
        for control in present:
            if control.first_epoch is None:
                # Numbered among the loaders of the same first epoch, so that a loader that is
                # reloaded every epoch draws the same in a resumed run.
                control.enter(sum(other.first_epoch == epoch for other in present), epoch)
            control.start_epoch(epoch, self._consumed.get(stage))

    def restore_numbers(self, stage: str, epoch: int) -> None:
        """Restore the numbers of datasets, which an iteration before the epoch may have changed."""
        for control in self._controlled:
            if control.stage == stage:
                control.restore_numbers(epoch, self._consumed.get(stage))

    def restart(self, stage: str) -> None:
        """Let the next ``start_epoch`` of a stage start the same epoch again."""
        for control in self._controlled:
            if control.stage == stage:
                control.started = None

    def restart_epoch(self, stage: str, epoch: int) -> None:
        """Start an epoch again, before a stage's loaders are iterated again from its beginning.

        Workers may already hold batches of an iteration that was not consumed.
        """
        for control in self._controlled:
            if control.stage == stage:
                control.reset(epoch)
        self.start_epoch(stage, epoch)

    def release(self) -> None:
        """Restore every replaced attribute in reverse order, and stop persistent workers."""
        for control in self._controlled:
            control.stop_workers()
        self._controlled.clear()
        self._replacements.undo()

    def _control(self, loader: Any, stage: str) -> Any:
        # Do not keep loaders alive that are reloaded every epoch.
        self._controlled = [control for control in self._controlled if control.loader() is not None]
        for control in self._controlled:
            if control.loader() is loader:
                if control.stage == stage:
                    control.started = None  # it is iterated from the beginning next
                    return loader
                loader = _copy_original(loader)
                break
        stream = RandomStreams(self._seed, self._fit, self._rank, stage)
        control = _ControlledLoader(
            loader,
            stream,
            self._replacements,
            per_sample=self._per_sample_rng,
            host_sets_epochs=self._host_sets_epochs,
            numbers=self._find_first_numbers(loader.dataset),
        )
        self._controlled.append(control)
        return loader

    def _find_first_numbers(self, dataset: Any) -> Numbers | None:
        """Return the numbers of a dataset before it was iterated; None if they do not matter.

        The batches of a dataset with indices are seeded one by one, and a dataset with a
        ``state_dict`` says itself where it is.
        """
        if not isinstance(dataset, IterableDataset) or hasattr(dataset, "load_state_dict"):
            return None
        known = [numbers for owner, numbers in self._first_numbers if owner() is dataset]
        if not known:
            known = [read_numbers(dataset)]
            self._first_numbers.append((weakref.ref(dataset), known[0]))
        return known[0]


@dataclass(frozen=True)
class _Consumed:
    """The position in an epoch at which its run was interrupted."""

    epoch: int
    batches: int
    cycled: Callable[[], bool]
    samplers: Mapping[str, Any]


class _ControlledLoader:
    """One controlled loader."""

    def __init__(
        self,
        loader: Any,
        stream: RandomStreams,
        replacements: AttributePatches,
        *,
        per_sample: bool,
        host_sets_epochs: bool,
        numbers: Numbers | None,
    ) -> None:
        # Workers may receive the order of epoch 0 before Lightning sets the epoch; a resumed run
        # would see that order again.
        self._sets_epochs = loader.num_workers > 0 or not host_sets_epochs
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
        # torch draws the base seed of the workers from this generator.
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
                # Running workers do not have these streams, so torch must start new ones.
                replacements.replace(loader, "_iterator", None)
                if iterable:
                    stream.shared = torch.zeros(2, dtype=torch.int64).share_memory_()
        self.at_start: dict[str, Any] = {}
        self._dataset = weakref.ref(loader.dataset) if numbers is not None else None
        self._first_numbers = numbers or {}
        self._has_numbers = False
        self._foreign = is_foreign(find_samplers(loader))
        user_sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        draws = not draws_nothing(loader)
        self._requests = ResumableSampler(
            user_sampler,
            stream,
            foreign=self._foreign,
            draws=draws,
            # torch makes this iterator first, and then that of the dataset.
            on_start=self._keep_numbers,
        )
        batching = loader.batch_sampler is not None
        replacements.replace(loader, "batch_sampler" if batching else "sampler", self._requests)
        if not iterable:
            if hasattr(loader, "load_state_dict"):
                # torchdata's loader; this class restores the position in the epoch.
                replacements.replace(loader, "load_state_dict", _ignore)
            guard = RngGuard() if draws else NoRngGuard()
            seeded = SeededDataset(loader.dataset, stream, per_sample and draws, guard)
            replacements.replace(loader, "dataset", seeded)
            replacements.replace(loader, "collate_fn", SeededCollate(loader.collate_fn, guard))
        # torch itself seeds a data pipe in every epoch, and traverses it to do so.
        elif stream.shared is not None and not isinstance(loader.dataset, IterDataPipe):
            seeded = SeededDataset(loader.dataset, stream, per_sample, RngGuard())
            replacements.replace(loader, "dataset", seeded)

    @property
    def number(self) -> int:
        """Ordinal of the loader in its stage."""
        return self._stream.number

    def stop_workers(self) -> None:
        """Stop persistent workers, which the traceback of an error may otherwise keep alive."""
        iterator = getattr(self.loader(), "_iterator", None)
        if isinstance(iterator, _MultiProcessingDataLoaderIter):
            iterator._shutdown_workers()  # noqa: SLF001 - the only way

    def capture_samplers(self) -> dict[str, Any]:
        """Return the states of the samplers' generators, and the numbers of the dataset."""
        return capture_generators(self._owners()) | self._capture_numbers()

    def _capture_numbers(self) -> dict[str, Any]:
        dataset = None if self._dataset is None else self._dataset()
        if dataset is None:
            return {}
        changed = find_changed(self._first_numbers, read_numbers(dataset))
        return {NUMBERS: changed} if changed else {}

    def _keep_numbers(self) -> None:
        self.at_start.pop(NUMBERS, None)
        self.at_start |= self._capture_numbers()

    def restore_numbers(self, epoch: int, consumed: "_Consumed | None") -> None:
        """Restore the numbers that the dataset had where the run was interrupted."""
        dataset = None if self._dataset is None else self._dataset()
        if dataset is not None and consumed is not None and consumed.epoch == epoch:
            states = consumed.samplers.get(str(self.number), {})
            write_numbers(dataset, states.get(NUMBERS, {}))
            self._has_numbers = True

    def _owners(self) -> dict[str, object]:
        loader = self.loader()
        samplers = [] if loader is None or not self._foreign else find_samplers(loader)
        return {str(number): sampler for number, sampler in enumerate(samplers)}

    def reset(self, epoch: int) -> None:
        """Restore the samplers' generators to the start of the current epoch."""
        if self.started == epoch:
            restore_generators(self._owners(), self.at_start)
            self.started = None

    def enter(self, number: int, epoch: int) -> None:
        """Set the loader's first epoch and its number among the loaders of that epoch."""
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
            # The same draw as torch's; see `WorkerInit`.
            drawn = torch.empty((), dtype=torch.int64).random_(generator=self._generator)
            self._stream.workers = int(drawn)
            self._generator.manual_seed(seed)
        resumed = consumed is not None and consumed.epoch == epoch
        if consumed is not None and resumed:
            restore_generators(self._owners(), consumed.samplers.get(str(self.number), {}))
            if not self._has_numbers:  # otherwise hooks may have set them since
                self.restore_numbers(epoch, consumed)
        self._seed_samplers(loader, epoch)
        self.at_start = self.capture_samplers()
        # A loader of an iterable dataset restores its position itself, or cannot.
        if consumed is not None and resumed and not self._iterable:
            self._requests.start_epoch(consumed.batches, consumed.cycled)
        else:
            self._requests.start_epoch()

    def _seed_samplers(self, loader: Any, epoch: int) -> None:
        for number, sampler in enumerate(find_samplers(loader)):
            if isinstance(sampler, DistributedSampler):
                # All ranks must split the same permutation.
                seed = self._stream.derive("shards", worker=number, shared=True)
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
            generator.manual_seed(self._stream.derive("order", worker=number, shared=shared))
        if self.stage != "train" or not self._sets_epochs:
            return  # the host calls `set_epoch` before the sampler is iterated
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
    """Ignore the state; the position comes from ``resume_epoch``."""


def _copy_original(loader: Any) -> Any:
    """Copy a controlled loader without its control."""
    duplicate = copy_loader(loader)
    if isinstance(duplicate.worker_init_fn, WorkerInit):
        duplicate.worker_init_fn = duplicate.worker_init_fn.user_function
    if type(duplicate.collate_fn) is SeededCollate:
        duplicate.collate_fn = duplicate.collate_fn.user_function
    if type(duplicate.dataset) is SeededDataset:
        object.__setattr__(duplicate, "dataset", vars(duplicate.dataset)["_dataset"])
    return duplicate
