"""Random generators, and the state of what loads data."""

import re
from collections.abc import Iterator
from itertools import islice
from typing import Any, Literal

from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_d9m.engine.control.data.data_state import (
    CHANGES,
    DATA,
    LOGGED_DATA,
    UNKNOWN_DATA,
    list_paths,
    list_unsaved,
)
from lightning_d9m.engine.control.data.resumable_sampler import has_state
from lightning_d9m.engine.control.seeding import (
    capture_generators,
    decode_rng,
    encode_rng,
    find_lost_devices,
    restore_generators,
    restore_rng,
)
from lightning_d9m.engine.state.parts import is_of_program
from lightning_d9m.engine.state.state import find_generators
from lightning_d9m.integrations.lightning.resume.part import Moment, Part, Phase
from lightning_d9m.integrations.lightning.resume.position import is_at_end
from lightning_d9m.integrations.lightning.resume.run_facts import FIT, name_all
from lightning_d9m.integrations.trainer import lightning_private
from lightning_d9m.integrations.trainer.trainer_attributes import Trainer

# The prefix of the paths of the loaders of validation.
_VALIDATION = "validate."
_NOT_HELD = (
    "{} changes while samples are read, and a checkpoint does not hold it. A resumed run begins "
    "without it; if samples depend on what it holds, they differ."
)
_UNMATCHED = (
    "These generators are only in the checkpoint, or only in this run: {}. Create them before "
    "training starts, as in the run that saved the checkpoint."
)
_RELOADED = (
    "The loaders are loaded again for the epoch that is resumed "
    "(reload_dataloaders_every_n_epochs), and their datasets, samplers or datamodule keep "
    "generators, or values that change: {}. Whether these go on or start again is not known. Keep "
    "generators in the module or the datamodule, or draw from those of Python, NumPy or torch; "
    "take the epoch from set_epoch()."
)

_OTHER_SIZES = (
    "The batches of the training loaders had {} samples when the checkpoint was saved, and have {} "
    "now. Make the loaders as then; with BatchSizeFinder, pass the size that it found."
)


class Generators(Part):
    """The states of the generators that datasets of loaders hold, by path."""

    name, form = "generators", dict[str, Tensor]
    restored, checked, evaluated = ("validation", "epoch", "batch"), "train", True

    def capture(self, _phase: Phase) -> dict[str, Tensor]:
        return capture_generators(name_datasets(self.trainer))

    def restore(self, state: dict[str, Tensor], moment: Moment) -> None:
        # When a loader of validation has been loaded, that of training may have begun its epoch
        # already.
        prefix = _VALIDATION if moment == "validation" else ""
        found = {path: own for path, own in state.items() if path.startswith(prefix)}
        restore_generators(name_datasets(self.trainer), found)

    def problems(self, state: dict[str, Tensor]) -> list[str]:
        # Of either side: one that is only here was not saved, one that is only there cannot be set.
        unmatched = find_generators(name_datasets(self.trainer)).keys() ^ state
        if not lightning_private.has_loaders(self.trainer.fit_loop.epoch_loop.val_loop):
            unmatched = {path for path in unmatched if not path.startswith(_VALIDATION)}
        return name_all(_UNMATCHED, sorted(unmatched))


class Samplers(Part):
    """The states of the user's samplers and datasets, by number of the loader.

    Those of training are restored when a loader is loaded, see ``ResumableFit``.
    """

    name = "samplers"
    restored = ("validation",)

    def capture(self, phase: Phase) -> dict[str, Any]:
        control = self.fit.session.loaders
        at_end, within = is_at_end(self.trainer), phase != "epoch"
        found = control.capture_samplers("train", within=within, at_end=at_end)
        others = control.capture_samplers("validate", within=phase == "validation")
        found |= {f"{_VALIDATION}{number}": states for number, states in others.items()}
        self.fit.unknown += list_paths(found, UNKNOWN_DATA)
        self.fit.inexact += list_unsaved(found)
        self.lost = [_NOT_HELD.format(path) for path in list_paths(found, LOGGED_DATA)]
        return found

    def restore(self, state: dict[str, Any], _moment: Moment) -> None:
        states = {
            name.removeprefix(_VALIDATION): states
            for name, states in state.items()
            if name.startswith(_VALIDATION)
        }
        self.fit.session.loaders.restore_samplers("validate", states)


class Reloads(Part):
    """The epochs in which the loaders of training and of validation were last loaded."""

    name, form = "reloads", dict[str, int | None]
    restored, checked = ("load", "validation", "epoch"), "train"

    def capture(self, _phase: Phase) -> dict[str, int | None]:
        read = lightning_private.get_reload_epoch
        return {"train": read(self.trainer, "train"), "validate": read(self.trainer, "validate")}

    def restore(self, state: dict[str, int | None], moment: Moment) -> None:
        if moment == "load":
            self.fit.session.resume_fit(self.fit.saved["settings"][FIT], state)
            return
        fit = self.trainer.fit_loop
        stage: Literal["train", "validate"] = "train" if moment == "epoch" else "validate"
        epoch = (
            fit.epoch_progress.current.processed if stage == "train" else self.trainer.current_epoch
        )
        if (saved := state[stage]) is not None:
            # So that the next reload is due in time.
            due = epoch - saved >= self.trainer.reload_dataloaders_every_n_epochs
            lightning_private.set_reload_epoch(self.trainer, stage, epoch if due else saved)

    def problems(self, state: dict[str, int | None]) -> list[str]:
        """Name what a dataset holds that is loaded again.

        The dataset may be a new object, whose generator starts again, or the same one, whose
        generator continues.
        """
        saved, every = self.fit.saved, self.trainer.reload_dataloaders_every_n_epochs
        loaded = {"train.": state["train"], _VALIDATION: state["validate"]}
        stages = tuple(
            stage
            for stage, epoch in loaded.items()
            if every and epoch is not None and saved["position"].epoch - epoch >= every
        )
        paths = [*saved["generators"]]
        for number, states in saved["samplers"].items():
            loader = number if number.startswith(_VALIDATION) else f"train.{number}"
            changed = (path.partition(".")[2] for path in states.get(CHANGES, {}))
            paths += [f"{loader}.{path}" for path in states.get(DATA, {})]
            paths += [f"{loader}.sampler.{path}" for path in changed]
        reloaded = [path.rstrip("'") for path in paths if path.startswith(stages)]
        if every and (stages or any(state.values())):
            # Of its numbers and texts loaders may be made, such as the size of batches.
            reloaded += [
                path for path in saved["program"] if re.fullmatch(r"datamodule\.\w+", path)
            ]
        return name_all(_RELOADED, reloaded)


class BatchSizes(Part):
    """The numbers of samples in a batch of each training loader; None where no loader says it.

    A loader is made before the state of the program is restored, which may say the size.
    """

    name, form, checked = "batch_sizes", list[int | None], "train"

    def capture(self, _phase: Phase) -> list[int | None]:
        loaders = lightning_private.list_loaders(self.trainer.fit_loop)
        return [getattr(loader, "batch_size", None) for loader in loaders]

    def problems(self, state: list[int | None]) -> list[str]:
        # A loader that is loaded for each epoch may have another size in the next one.
        every = self.trainer.reload_dataloaders_every_n_epochs
        may_differ = every and self.fit.was_saved_between_epochs
        now = self.capture("epoch")
        return [] if may_differ or state == now else [_OTHER_SIZES.format(state, now)]


class Rng(Part):
    """The generators of training, which an epoch seeds: None between epochs."""

    name, form = "rng", dict[str, Any] | None
    restored, checked = ("batch",), "train"

    def capture(self, phase: Phase) -> dict[str, Any] | None:
        return None if phase == "epoch" else encode_rng(self.fit.session.capture_rng())

    def restore(self, state: dict[str, Any] | None, _moment: Moment) -> None:
        if state is not None:
            restore_rng(decode_rng(state))

    def problems(self, state: dict[str, Any] | None) -> list[str]:
        return [] if state is None else find_lost_devices(state)


def name_datasets(trainer: Trainer) -> dict[str, object]:
    """Return the datasets and functions of the loaders, and what is in loaders of the program."""
    owners: dict[str, object] = {}
    fit = trainer.fit_loop
    for stage, loop in (("train", fit), ("validate", fit.epoch_loop.val_loop)):
        for number, part in enumerate(lightning_private.list_loaders(loop)):
            for name in ("dataset", "collate_fn"):
                owners[f"{stage}.{number}.{name}"] = getattr(part, name, None)
            if _iterates_itself(part):
                # The attributes of a loader of torch, read from one, as they differ between its
                # versions.
                own = vars(part).keys() - vars(DataLoader(range(1))).keys()  # type: ignore[arg-type]
                owners |= {f"{stage}.{number}.loader.{name}": vars(part)[name] for name in own}
    return owners


def _iterates_itself(loader: object) -> bool:
    """Return whether the program has written the iteration of a loader."""
    # The first class that has `__iter__` is the one whose code runs.
    own = (kind for kind in type(loader).__mro__ if "__iter__" in vars(kind))
    return any(map(is_of_program, islice(own, 1)))


def reads_when_iterated(trainer: Trainer) -> bool:
    """Return whether a training loader may read its dataset when its iterator is made.

    Workers then get a copy of it. In this process torch's loader does not read a map-style dataset
    before a batch is fetched, and its batches are seeded one by one. Persistent workers are
    excluded, whose copy stays as it was before the first epoch; and an iterator: making it again
    would lose its first batch.
    """
    return any(
        not loader.persistent_workers
        and (loader.num_workers > 0 or isinstance(loader.dataset, IterableDataset))
        if isinstance(loader, DataLoader) and not _iterates_itself(loader)
        else not isinstance(loader, Iterator)
        for loader in lightning_private.list_loaders(trainer.fit_loop)
    )


def drop_consumed_states(trainer: Trainer) -> None:
    """Leave out states of loaders that only count the batches of the epoch that has ended.

    A fit of a number of steps (``max_steps``) loads them between epochs too, where torchdata's
    loader would skip as many batches of the next epoch.
    """
    loaders = lightning_private.list_loaders(trainer.fit_loop)
    stateful = [loader for loader in loaders if has_state(loader)]
    states = lightning_private.list_pending_loader_states(trainer)
    if len(states) == len(stateful):  # otherwise Lightning raises an error
        kept = [
            {} if isinstance(loader, DataLoader) and not has_state(loader.dataset) else state
            for loader, state in zip(stateful, states, strict=True)
        ]
        lightning_private.set_pending_loader_states(trainer, kept)
