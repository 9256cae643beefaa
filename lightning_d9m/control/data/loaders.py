"""Controlled loaders, whose order and workers depend only on (seed, epoch).

This module knows torch's ``DataLoader``, not Lightning. ``release`` restores every replaced
attribute of the user's objects.
"""

import weakref
from collections.abc import Callable, Mapping
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from lightning_d9m.attribute_patches import AttributePatches
from lightning_d9m.control.data.controlled_loader import ControlledLoader, ReachedPosition
from lightning_d9m.control.data.dataset_numbers import Numbers, read_first_numbers
from lightning_d9m.control.data.samplers import copy_loader
from lightning_d9m.control.data.seeded_dataset import (
    SeededCollate,
    SeededDataset,
    WorkerInit,
)
from lightning_d9m.control.random_streams import RandomStreams


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
        self._controlled: list[ControlledLoader] = []
        self._replacements = AttributePatches()
        self._consumed: dict[str, ReachedPosition] = {}
        # What each dataset had before it was first iterated.
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
            str(control.number): control.capture(within=within, at_end=at_end)
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

    def restore_samplers(self, stage: str, samplers: Mapping[str, Any]) -> None:
        """Restore what ``capture_samplers`` returned, after the loaders were loaded."""
        for control in self._controlled:
            if control.stage == stage:
                control.restore(samplers.get(str(control.number), {}))

    def keep_iterated(self, stage: str) -> None:
        """Note that a stage's loaders were iterated in advance, as ``restart_epoch`` may undo."""
        for control in self._controlled:
            if control.stage == stage:
                control.keep_iterated()

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
        earlier = self._controlled
        self._controlled = [control for control in earlier if control.loader() is not None]
        for control in self._controlled:
            if control.loader() is loader:
                if control.stage == stage:
                    control.started = None  # it is iterated from the beginning next
                    return loader
                loader = _copy_original(loader)
                break
        stream = RandomStreams(self._seed, self._fit, self._rank, stage)
        control = ControlledLoader(
            loader,
            stream,
            self._replacements,
            per_sample=self._per_sample_rng,
            host_sets_epochs=self._host_sets_epochs,
            numbers=self._find_first_numbers(loader),
            earlier=earlier,
        )
        self._controlled.append(control)
        return loader

    def _find_first_numbers(self, loader: Any) -> Numbers | None:
        """Return the numbers of a dataset before it was iterated; None if they do not matter.

        A dataset with a ``state_dict`` says itself where it is. Persistent workers have a copy of a
        dataset with indices, which changes of the program do not reach.
        """
        dataset = loader.dataset
        stays = loader.num_workers > 0 and loader.persistent_workers
        iterable = isinstance(dataset, IterableDataset)
        if hasattr(dataset, "load_state_dict") or not hasattr(dataset, "__dict__"):
            return None
        if stays and not iterable:
            return None
        known = [numbers for owner, numbers in self._first_numbers if owner() is dataset]
        if not known:
            known = [read_first_numbers(dataset)]
            self._first_numbers.append((weakref.ref(dataset), known[0]))
        return known[0]


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
