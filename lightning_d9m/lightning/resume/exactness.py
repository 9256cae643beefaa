"""Reasons why a run cannot be resumed exactly from a checkpoint, one sentence for each.

The run that saves a checkpoint knows some of them and stores them in it; the run that loads it
finds the others.
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from lightning_d9m.control.data.resumable_sampler import (
    find_counting_problem,
    find_epoch_problem,
    find_position_problem,
    find_worker_problem,
)
from lightning_d9m.errors import InexactResumeError
from lightning_d9m.hashing.shards import find_hybrid_sharding, has_base
from lightning_d9m.lightning import lightning_private
from lightning_d9m.lightning.packages import rank_zero
from lightning_d9m.lightning.saved_state import LOGICAL_RANKS_KEY, LoopPosition, SavedState
from lightning_d9m.lightning.trainer_attributes import get_logical_ranks

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

    from lightning_d9m.lightning.trainer_session import TrainerSession


# The settings that select the random streams. (The others change speed, or are in the ledger.)
_RNG_SETTINGS = ("seed", "per_sample_rng")


def find_missing_state(trainer: "Trainer", position: LoopPosition) -> list[str]:
    """Return why a checkpoint that is being saved cannot be resumed exactly."""
    fit = trainer.fit_loop
    found = _listed(_find_unfinished_epoch(trainer, position))
    within = position.phase != "epoch" and not is_at_end(trainer)
    for loader in lightning_private.list_loaders(fit):
        problem = find_position_problem(loader) if within else find_unsaved_loader_state(loader)
        found += _listed(problem or find_counting_problem(loader))
        # Lightning loads the state of a loader in a fit of a number of steps.
        if position.phase == "epoch" and trainer.max_steps < 0:
            found += _listed(find_epoch_problem(loader))
    for loader in lightning_private.list_loaders(fit.epoch_loop.val_loop):
        found += _listed(find_unsaved_loader_state(loader))
    return found


def is_cut_by_max_steps(trainer: "Trainer") -> bool:
    """Return whether ``max_steps`` has ended the fit, and batches of the epoch are left."""
    by_steps = reaches_max_steps(trainer, trainer.global_step) and not trainer.should_stop
    return by_steps and _has_batches_left(trainer)


def _has_batches_left(trainer: "Trainer") -> bool:
    # A batch that `on_train_batch_start` has skipped, which ends the epoch in every run, is ready
    # and not completed.
    batches = trainer.fit_loop.epoch_loop.batch_progress.current
    return 0 < batches.completed == batches.ready and not is_at_end(trainer)


def _find_unfinished_epoch(trainer: "Trainer", position: LoopPosition) -> str | None:
    """Return why an epoch that ``trainer.should_stop`` cut short cannot go on, or None."""
    if position.phase != "epoch" or not trainer.should_stop or not _has_batches_left(trainer):
        return None
    then = "Lightning begins the next epoch when it resumes; a longer fit"
    return _describe_unfinished(trainer, position.epoch - 1, "trainer.should_stop", then)


def describe_cut(trainer: "Trainer", epoch: int, names: list[str]) -> str:
    """Return why an epoch that ``max_steps`` cut short cannot go on, given what hooks changed."""
    then = f"hooks at the end of the epoch or the fit changed {names[0]}, where a longer fit"
    return _describe_unfinished(trainer, epoch, "max_steps", then)


def _describe_unfinished(trainer: "Trainer", epoch: int, cause: str, then: str) -> str:
    trained = trainer.fit_loop.epoch_loop.batch_progress.current.completed
    return (
        f"Its fit ended after {trained} batches of epoch {epoch}, by {cause}, and {then} would "
        "train the rest. Resume from a checkpoint within the epoch: "
        "ModelCheckpoint(every_n_train_steps=...)."
    )


def describe_lost_tensor(name: str) -> str:
    """Return why a checkpoint that lacks a tensor of the model cannot be resumed exactly."""
    return (
        f"The checkpoint lacks {name!r}, which changes in the fit, as that of ModelPruning lacks "
        "the masks of pruned weights, which would be trained again. Save all weights and buffers "
        "that change."
    )


def find_unsaved_loader_state(loader: Any) -> str | None:
    """Return why generators in a loader's persistent workers cannot be saved, or None."""
    return find_worker_problem(loader) if getattr(loader, "persistent_workers", False) else None


def report_late(problem: str, *, raises: bool) -> None:
    """Report a problem of a checkpoint that was saved a moment before.

    Raises:
        InexactResumeError: If ``raises``.
    """
    text = f"The checkpoint that was just saved cannot be resumed exactly:\n- {problem}"
    if raises:
        raise InexactResumeError(text, reasons=[problem])
    rank_zero().rank_zero_info(text)


def _find_unresumable_loaders(trainer: "Trainer") -> list[str]:
    """Return why checkpoints that a fit saves within an epoch could not be resumed exactly."""
    fit = trainer.fit_loop
    found = [
        find_position_problem(loader) or find_unsaved_loader_state(loader)
        for loader in lightning_private.list_loaders(fit)
    ]
    found += [
        find_unsaved_loader_state(loader)
        for loader in lightning_private.list_loaders(fit.epoch_loop.val_loop)
    ]
    return [problem for problem in found if problem is not None]


def report_unresumable(trainer: "Trainer", *, raises: bool) -> None:
    """Report which checkpoints of a fresh fit could not be resumed exactly.

    Raises:
        InexactResumeError: If there are any.
    """
    prospects = _find_unresumable_loaders(trainer)
    if not prospects:
        return
    listed = "\n".join(f"- {problem}" for problem in prospects)
    text = f"Checkpoints of this run could not be resumed exactly:\n{listed}"
    if raises:
        raise InexactResumeError(
            f"{text}\nTo train anyway, leave on_inexact_resume at its default: then the error "
            "is raised when such a checkpoint is loaded.",
            reasons=prospects,
        )
    if _saves_within_epochs(trainer):
        rank_zero().rank_zero_info(f"{text}\nThis is an error when such a checkpoint is loaded.")


def _saves_within_epochs(trainer: "Trainer") -> bool:
    """Return whether a callback is configured to save checkpoints within epochs."""
    return any(
        lightning_private.saves_between_batches(callback)
        or getattr(callback, "save_on_exception", False)
        or has_base(callback, "OnExceptionCheckpoint")
        or trainer.val_check_interval != 1.0
        for callback in trainer.checkpoint_callbacks
    )


def describe_settings(trainer: "Trainer", session: "TrainerSession") -> dict[str, Any]:
    """Return the settings in a checkpoint, which ``find_resume_problems`` compares with a run's."""
    settings: dict[str, Any] = dict(session.settings.as_record())
    logical_ranks = get_logical_ranks(trainer)
    return settings if logical_ranks is None else {**settings, LOGICAL_RANKS_KEY: logical_ranks}


def find_resume_problems(
    state: SavedState, trainer: "Trainer", settings: Mapping[str, object]
) -> list[str]:
    """Return why a run cannot be resumed exactly from the state that a checkpoint holds.

    ``settings`` are those of the run that resumes.
    """
    problems = [
        f"It was saved with {name}={expected!r}; now it is {settings.get(name)!r}."
        for name, expected in state.settings.items()
        if settings.get(name) != expected and name in _RNG_SETTINGS
    ]
    logical_ranks = settings.get(LOGICAL_RANKS_KEY)
    if state.logical_ranks != logical_ranks:
        problems.append(
            f"It was saved with logical_ranks={state.logical_ranks}; now it is {logical_ranks}, so "
            "the ranks get different data."
        )
    elif logical_ranks is not None and state.settings.get("threads") != settings.get("threads"):
        problems.append(
            f"It was saved by processes of {state.settings.get('threads')} CPU threads; now they "
            f"have {settings.get('threads')}, which round differently. Pass "
            "DeterminismCallback(threads=...)."
        )
    elif not state.fits(trainer.world_size, state.logical_ranks):
        problems.append(
            f"It was saved by {state.world_size} ranks; now there are {trainer.world_size}, "
            "which get different data."
        )
    problems += _listed(find_hybrid_sharding([trainer.strategy]))
    position = state.position
    if position.phase == "within":
        problems.append(
            f"It was saved while batch {position.batch} of epoch {position.epoch} was trained: it "
            "holds part of the changes of that batch, which would be trained again."
        )
    if not reaches_max_steps(trainer, position.step):
        # Those of all ranks, so that all ranks agree. If no step remains, they do not matter.
        problems += dict.fromkeys(reason for rank in state.ranks for reason in rank.inexact)
    return problems


def describe_unmatched_state(paths: Iterable[str]) -> list[str]:
    """Return why generators at these paths cannot be restored."""
    return _name_all(
        paths,
        "These generators are only in the checkpoint, or only in this run: {}. Create them before "
        "training starts, as in the run that saved the checkpoint.",
    )


def describe_missing_objects(paths: Iterable[str]) -> list[str]:
    """Return why what a checkpoint holds of the program's objects cannot be restored."""
    return _name_all(
        paths,
        "The checkpoint holds values of objects that this run lacks, or that take others: {}. "
        "Create them before training starts, as in the run that saved the checkpoint.",
    )


def describe_reloaded_generators(paths: Iterable[str]) -> list[str]:
    """Return why state in loaders that are loaded again cannot be restored."""
    return _name_all(
        paths,
        "The loaders are loaded again for the epoch that is resumed "
        "(reload_dataloaders_every_n_epochs), and their datasets or samplers keep generators, or "
        "values that change: {}. Whether these continue or start again cannot be known. Keep "
        "generators in the module or the datamodule, or draw from those of Python, NumPy or torch; "
        "take the epoch from set_epoch().",
    )


def _name_all(paths: Iterable[str], problem: str) -> list[str]:
    """Return a problem with the paths in the place of ``{}``; nothing without paths."""
    named = ", ".join(paths)
    return [problem.format(named)] if named else []


def find_lost_progress(trainer: "Trainer", position: LoopPosition) -> str | None:
    """Return why a fit does not begin where its checkpoint was saved, or None."""
    if trainer.global_step == position.step:
        return None
    return (
        f"The fit begins at step {trainer.global_step}, and the checkpoint was saved at step "
        f"{position.step}: a callback such as LearningRateFinder or BatchSizeFinder has loaded a "
        "checkpoint since, and Lightning forgets the first one then. Resume without that callback."
    )


def is_at_end(trainer: "Trainer") -> bool:
    """Return whether no batch of the epoch is left."""
    return bool(trainer.fit_loop.epoch_loop.batch_progress.is_last_batch)


def reaches_max_steps(trainer: "Trainer", step: int) -> bool:
    """Return whether the fit has no step left after this one."""
    return 0 <= trainer.max_steps <= step  # -1: unlimited


def _listed(problem: str | None) -> list[str]:
    return [] if problem is None else [problem]


_REMEDY = (
    "Call the dataset's set_epoch() when an epoch starts, if it has one; or save checkpoints at "
    "the end of an epoch, and load with a loader that has no state_dict()."
)


class EpochLength:
    """Compares the length of the epoch after the resumed one with what is left of this one.

    Some loaders apply the state that they load in every later epoch: a Hugging Face
    ``IterableDataset`` whose ``set_epoch`` is not called, litData's ``StreamingDataLoader`` 0.2.76.
    The epoch after the resumed one then lacks the batches that preceded the checkpoint.

    Args:
        batch: The number of batches of the resumed epoch that preceded the checkpoint; 0 if the
            checkpoint was saved between epochs.

    Attributes:
        is_checked: Whether the epoch after the resumed one has ended; later ones tell nothing.
    """

    def __init__(self, batch: int) -> None:
        self._batch = batch
        self._resumed: int | None = None if batch else 0
        self.is_checked = False

    def end_epoch(self, trainer: "Trainer") -> str | None:
        """Return a problem at the end of an epoch, as sentences; None without one."""
        progress: Any = trainer.fit_loop.epoch_loop.batch_progress
        length = int(progress.current.ready)
        if self._resumed is None:
            self._resumed = length
            return None
        checked, self.is_checked = self.is_checked, True
        if checked or length != self._resumed - self._batch:
            return None
        before = f", and the epoch before {self._resumed}" if self._batch else ""
        return (
            f"Epoch {trainer.current_epoch} had {length} batches{before}: its loader began at the "
            f"position that it has from the checkpoint. {_REMEDY}"
        )
