"""The position of a fit, the work that remains there, and the end of the fit.

Lightning saves checkpoints in hooks after which work remains, the validation that follows a batch,
or the end of the epoch. A resumed fit of Lightning skips it; see ``finish_pending_work``.
"""

from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Struct
from msgspec.structs import asdict

from lightning_d9m.engine.control.data.loaders import find_epoch_problem, find_loader_problems
from lightning_d9m.integrations.lightning.resume.part import Moment, Part, Phase
from lightning_d9m.integrations.trainer import lightning_private
from lightning_d9m.integrations.trainer.packages import rank_zero
from lightning_d9m.integrations.trainer.trainer_attributes import Trainer

_WITHIN = (
    "It was saved while batch {} of epoch {} was trained: it holds part of the changes of that "
    "batch, which would be trained again."
)
_ENDED = (
    "The fit that saved the checkpoint had ended there by trainer.should_stop, as EarlyStopping "
    "ends it"
)
_FINISHED = (
    f"{_ENDED}, so this one is finished, too. To train longer, pass "
    'DeterminismCallback(on_inexact_resume="warn").'
)
_LONGER = f"{_ENDED}, and this one trains longer."
_STOPPING = (
    "The checkpoint was saved after trainer.should_stop was set, before the validation and the end "
    "of the epoch that follow. Use one that was saved there."
)
_WITHOUT_STEPS = (
    "It was saved in an epoch that trains nothing, in which StochasticWeightAveraging only reads "
    "the statistics of batch normalization, and a resumed run would train that epoch. Use one that "
    "was saved at the end of an epoch."
)


class LoopPosition(Struct, frozen=True, forbid_unknown_fields=True):
    """The position of a fit.

    Attributes:
        epoch: The next epoch, or the current one.
        step: The global step.
        batch: The number of trained batches of the epoch.
        phase: ``"epoch"`` between two epochs, ``"batch"`` between two batches, ``"cut"`` too, where
            ``max_steps`` ended the fit, ``"validation"`` in an unfinished validation,
            ``"within"`` while a batch is trained.
    """

    epoch: int
    step: int
    batch: int
    phase: Phase


class Position(Part):
    """The position at which the checkpoint was saved; the hooks around the loops use it."""

    name, form, scope, checked = "position", LoopPosition, "run", "load"

    def capture(self, _phase: Phase) -> dict[str, Any]:
        position = find_position(self.trainer)
        self.fit.inexact += find_missing_state(self.trainer, position)
        return asdict(position)

    def problems(self, state: LoopPosition) -> list[str]:
        within = _WITHIN.format(state.batch, state.epoch)
        return [within] if state.phase == "within" else []


class Limits(Part):
    """The limits of the fit that hooks have changed."""

    name, scope, restored = "limits", "run", ("load",)

    def begin(self) -> None:
        self._first = self._read().items()

    def _read(self) -> dict[str, Any]:
        fit = self.trainer.fit_loop
        named = {name: getattr(fit, name) for name in ("max_epochs", "min_epochs")}
        return named | {name: getattr(fit.epoch_loop, name) for name in ("max_steps", "min_steps")}

    def capture(self, _phase: Phase) -> dict[str, Any]:
        # Only what changed: otherwise a run with a larger `max_epochs` could not train longer.
        return dict(self._read().items() - self._first) if self.fit.has_begun else {}

    def restore(self, state: dict[str, Any], _moment: Moment) -> None:
        fit = self.trainer.fit_loop
        for name in self._read().keys() & state:
            setattr(fit if name.endswith("epochs") else fit.epoch_loop, name, state[name])


class Stopped(Part):
    """True if ``should_stop`` of the Trainer had ended the fit."""

    name, form, scope, checked = "stopped", bool, "run", "load"
    restored = ("load", "started")

    def capture(self, _phase: Phase) -> bool:
        stops = bool(self.trainer.should_stop)
        return stops and lightning_private.can_stop_early(self.trainer)

    def problems(self, state: bool) -> list[str]:
        return [_LONGER] if state and self.fit.accepts_breaks else []

    def restore(self, state: bool, moment: Moment) -> None:
        if not state or self.fit.accepts_breaks:
            return
        # Within an epoch Lightning would leave out what follows the checkpoint, so the fit stops
        # before its next batch.
        within = not self.fit.was_saved_between_epochs
        if moment == "load":
            rank_zero().rank_zero_info(_FINISHED)
            # Before the first epoch the loop reads it at once, and no hook of an epoch runs.
            self.trainer.should_stop = not within
        elif within:
            self.trainer.should_stop = True


def find_position(trainer: Trainer) -> LoopPosition:
    """Return the position of the fit, or of the checkpoint that the Trainer has loaded."""
    loop = trainer.fit_loop
    epochs = loop.epoch_progress.current
    batches = loop.epoch_loop.batch_progress.current
    step = trainer.global_step
    # Lightning counts an epoch as started after the hooks of its start, as processed before those
    # of its end, and as completed after those: a checkpoint of either kind of hook is between
    # epochs.
    if epochs.started == epochs.processed:
        return LoopPosition(epochs.processed, step, 0, "epoch")
    phase: Phase = "batch"
    validated = loop.epoch_loop.val_loop.batch_progress
    # A batch is ready when it was fetched, and processed before `on_train_batch_end`.
    if batches.ready != batches.processed:
        phase = "within"
    elif trainer.validating and not (
        # The hooks at the end of a validation run when its last batch is completed.
        validated.is_last_batch and validated.current.completed == validated.current.ready
    ):
        phase = "validation"
    elif is_cut_by_max_steps(trainer) and not trainer.validating:
        phase = "cut"
    return LoopPosition(epochs.processed, step, batches.processed, phase)


def is_at_end(trainer: Trainer) -> bool:
    """Return whether no batch of the epoch is left."""
    return bool(trainer.fit_loop.epoch_loop.batch_progress.is_last_batch)


def reaches_max_steps(trainer: Trainer, step: int) -> bool:
    """Return whether the fit has no step left after this one."""
    return bool(0 <= trainer.max_steps <= step)  # -1: unlimited


def is_cut_by_max_steps(trainer: Trainer) -> bool:
    """Return whether ``max_steps`` has ended the fit, and batches of the epoch are left."""
    # A batch that `on_train_batch_start` has skipped, which ends the epoch in every run, is ready
    # and not completed.
    batches = trainer.fit_loop.epoch_loop.batch_progress.current
    has_batches = 0 < batches.completed == batches.ready and not is_at_end(trainer)
    by_steps = reaches_max_steps(trainer, trainer.global_step) and not trainer.should_stop
    return by_steps and has_batches


def find_missing_state(trainer: Trainer, position: LoopPosition) -> list[str]:
    """Return why a checkpoint that is saved at this position cannot be resumed exactly."""
    between, fit = position.phase == "epoch", trainer.fit_loop
    if not between and lightning_private.skips_backward(trainer):
        return [_WITHOUT_STEPS]
    batches = fit.epoch_loop.batch_progress.current
    pending = position.phase == "validation" or batches.completed < batches.processed
    if trainer.should_stop and not between and pending:
        return [_STOPPING]
    within = not between and not is_at_end(trainer)
    found = [
        problem
        for loop, is_within in ((fit, within), (fit.epoch_loop.val_loop, False))
        for loader in lightning_private.list_loaders(loop)
        for problem in find_loader_problems(loader, within=is_within)
    ]
    # Lightning loads the state of a loader in a fit of a number of steps.
    if between and trainer.max_steps < 0:
        found += filter(None, map(find_epoch_problem, lightning_private.list_loaders(fit)))
    return found


def continue_cut(trainer: Trainer, position: LoopPosition, checkpoint: Mapping[str, Any]) -> None:
    """Continue the epoch that ``max_steps`` has cut, if the fit is longer now.

    The checkpoint was saved when Lightning had ended the epoch.
    """
    if position.phase == "cut" and not reaches_max_steps(trainer, position.step):
        progress = checkpoint["loops"]["fit_loop"]["epoch_progress"]
        # As they were in the epoch: started, and not yet processed.
        for part in (progress["total"], progress["current"]):
            part["processed"] = part["completed"] = part["started"] - 1


def finish_pending_work(
    trainer: Trainer, position: LoopPosition, reset: Callable[[], None]
) -> bool:
    """Let a fit that has loaded a checkpoint finish what was pending when that was saved.

    ``reset`` is that of the fit loop, in which Lightning reads the progress that it has loaded.

    Returns:
        Whether nothing remains of the last batch. Then the loop over the batches does not restart.
    """
    fit = trainer.fit_loop
    loop = fit.epoch_loop
    progress: Any = loop.batch_progress
    at_end = position.phase == "cut"
    if position.phase == "epoch":
        epochs = fit.epoch_progress
        if epochs.current.completed < epochs.current.processed:
            # Saved in a hook at the end of an epoch, after which these schedulers step.
            loop.update_lr_schedulers("epoch", update_plateau_schedulers=True)
        for part in (epochs.total, epochs.current):
            part.ready = part.started = part.completed = part.processed
        # Not a restart within the epoch: its start is still to be run.
        inner = (loop.val_loop, loop.automatic_optimization, loop.manual_optimization)
        for each in (fit, loop, *inner):
            lightning_private.clear_restart(each)
    elif position.phase in ("batch", "validation"):
        # A batch is completed after `on_train_batch_end`, in which ModelCheckpoint saves.
        saved_in_hook = progress.current.completed < progress.current.processed
        due = lightning_private.is_validation_due(trainer)
        if position.phase == "validation" or (saved_in_hook and due):
            _complete(progress)
            _reset_before_validation(loop.val_loop.batch_progress, position.phase, reset)
            return False
        at_end = saved_in_hook and progress.is_last_batch
        if at_end or not lightning_private.completes_batch(loop):
            _complete(progress)
            if not lightning_private.accumulates_gradients(trainer):
                lightning_private.count_step_batch(trainer)
            at_end = True
    _reset_by_epoch(progress, reset)
    return at_end


def _reset_by_epoch(progress: Any, reset: Callable[[], None]) -> None:
    """Let Lightning tell by the counts of this epoch which batch is not completed.

    It tells by the totals. A batch that ``on_train_batch_start`` skipped by -1, which ends an
    epoch, is never completed there, and the last batch before the checkpoint was trained again.
    """
    before, counted = {**vars(progress.total)}, {**vars(progress.current)}
    vars(progress.total).update(counted)
    reset()
    added = {name: count - counted[name] for name, count in vars(progress.total).items()}
    vars(progress.total).update({name: before[name] + count for name, count in added.items()})


def _complete(progress: Any) -> None:
    for part in (progress.total, progress.current):
        part.completed = part.processed


def _reset_before_validation(progress: Any, phase: Phase, reset: Callable[[], None]) -> None:
    """Let Lightning run a validation as a whole, as if it had been interrupted in its first batch.

    Afterwards the total counts the earlier validations of the epoch, and a batch that failed.
    """
    total, current = {**vars(progress.total)}, progress.current
    if phase == "validation":
        for name, count in vars(current).items():
            total[name] -= min(count, current.processed)
    progress.reset()
    # So Lightning knows a validation that was interrupted: as many batches started as were ready,
    # and one less processed and completed.
    progress.total.ready = progress.total.started = 1
    reset()
    vars(progress.total).update(total)
