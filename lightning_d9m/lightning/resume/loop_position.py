"""The position of a Trainer's fit, and the work that is pending there when it resumes.

Lightning saves checkpoints in hooks after which work remains: the validation that follows a batch,
the end of the epoch. A resumed fit of Lightning skips it; see ``finish_pending_work``.
"""

from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from lightning_d9m.control.data.resumable_sampler import has_state
from lightning_d9m.lightning import lightning_private
from lightning_d9m.lightning.resume.exactness import is_cut_by_max_steps
from lightning_d9m.lightning.saved_state import LoopPhase, LoopPosition
from lightning_d9m.lightning.trainer_attributes import Trainer
from lightning_d9m.state.parts import is_of_program

_COUNTERS = ("ready", "started", "processed", "completed")


def find_position(trainer: Trainer) -> LoopPosition:
    """Return the position of the fit, or of the checkpoint that the Trainer has loaded."""
    loop = trainer.fit_loop
    epochs = loop.epoch_progress.current
    batches = loop.epoch_loop.batch_progress.current
    step = trainer.global_step
    if epochs.started == epochs.processed:
        return LoopPosition(epochs.processed, step, 0, "epoch")
    phase: LoopPhase = "batch"
    validated = loop.epoch_loop.val_loop.batch_progress
    if batches.ready != batches.processed:
        phase = "within"
    elif trainer.validating and not (
        validated.is_last_batch and validated.current.completed == validated.current.ready
    ):
        phase = "validation"
    elif is_cut_by_max_steps(trainer) and not trainer.validating:
        phase = "cut"
    return LoopPosition(epochs.processed, step, batches.processed, phase)


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
        _begin_epoch(fit)
    elif position.phase in ("batch", "validation"):
        saved_in_hook = progress.current.completed < progress.current.processed
        due = lightning_private.is_validation_due(trainer)
        if position.phase == "validation" or (saved_in_hook and due):
            _complete(progress)
            _reset_before_validation(loop.val_loop.batch_progress, position.phase, reset)
            return False
        if saved_in_hook and progress.is_last_batch:
            _complete(progress)
            if not lightning_private.accumulates_gradients(trainer):
                lightning_private.count_step_batch(trainer)
            at_end = True
    _reset_by_epoch(progress, reset)
    return at_end


def reopen_epoch(checkpoint: Mapping[str, Any]) -> None:
    """Let a checkpoint of an epoch that ``max_steps`` cut short continue the epoch.

    It was saved when Lightning had ended the epoch.
    """
    progress = checkpoint["loops"]["fit_loop"]["epoch_progress"]
    for part in (progress["total"], progress["current"]):
        part["processed"] = part["completed"] = part["started"] - 1


def draws_when_iterated(trainer: Trainer) -> bool:
    """Return whether a training loader may draw in this process when its iterator is made.

    torch's loader does not read a map-style dataset before a batch is fetched, and its batches are
    seeded one by one. An iterator is excluded: making it again would lose its first batch.
    """
    return any(
        loader.num_workers == 0 and isinstance(loader.dataset, IterableDataset)
        if isinstance(loader, DataLoader) and not iterates_itself(loader)
        else not isinstance(loader, Iterator)
        for loader in lightning_private.list_loaders(trainer.fit_loop)
    )


def iterates_itself(loader: object) -> bool:
    """Return whether the program has written the iteration of a loader."""
    own = (kind for kind in type(loader).__mro__ if "__iter__" in vars(kind))
    return any(map(is_of_program, islice(own, 1)))


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


def makes_iterator_again(trainer: Trainer) -> bool:
    """Return whether Lightning is about to make the iterator of the training loaders again.

    It makes the first one when it loads them, and their workers start then.
    """
    fit = trainer.fit_loop
    resumes = getattr(fit, "is_resuming", False) or fit.epoch_loop.restarting
    return trainer.current_epoch > 0 and not resumes


def iterate_again(trainer: Trainer, loader_states: list[dict[str, Any]]) -> None:
    """Make the iterator over the training loaders again, at the start of a resumed epoch.

    Lightning makes it when it loads the loaders, and fetches the first batch of an iterable
    dataset at once. In an uninterrupted run it does so after ``on_train_epoch_start``, where the
    epoch is seeded.

    ``loader_states`` has the states that Lightning loaded from the checkpoint.
    """
    if loader_states:
        lightning_private.load_loader_states(trainer, loader_states)
    lightning_private.create_loader_iterator(trainer)


def _begin_epoch(fit: Any) -> None:
    if fit.epoch_progress.current.completed < fit.epoch_progress.current.processed:
        # Saved in a hook at the end of an epoch, after which these schedulers step.
        fit.epoch_loop.update_lr_schedulers("epoch", update_plateau_schedulers=True)
    for progress in (fit.epoch_progress.total, fit.epoch_progress.current):
        progress.ready = progress.started = progress.completed = progress.processed
    # Not a restart within the epoch: its start is still to be run.
    loops = [fit, fit.epoch_loop, fit.epoch_loop.val_loop]
    loops += [fit.epoch_loop.automatic_optimization, fit.epoch_loop.manual_optimization]
    for loop in loops:
        lightning_private.clear_restart(loop)


def _reset_by_epoch(progress: Any, reset: Callable[[], None]) -> None:
    """Let Lightning tell by the counts of this epoch which batch is not completed.

    It tells by the totals. A batch that ``on_train_batch_start`` skipped by -1, which ends an
    epoch, is never completed there, and the last batch before the checkpoint was trained again.
    """
    before = {name: getattr(progress.total, name) for name in _COUNTERS}
    for name in _COUNTERS:
        setattr(progress.total, name, getattr(progress.current, name))
    counted = {name: getattr(progress.total, name) for name in _COUNTERS}
    reset()
    for name in _COUNTERS:
        added = getattr(progress.total, name) - counted[name]
        setattr(progress.total, name, before[name] + added)


def _complete(progress: Any) -> None:
    for part in (progress.total, progress.current):
        part.completed = part.processed


def _reset_before_validation(progress: Any, phase: LoopPhase, reset: Callable[[], None]) -> None:
    """Let Lightning run a validation as a whole, as if it had been interrupted in its first batch.

    Afterwards the total counts the earlier validations of the epoch, and a batch that failed.
    """
    total = {name: getattr(progress.total, name) for name in _COUNTERS}
    if phase == "validation":
        current = progress.current
        for name in _COUNTERS:
            total[name] -= min(getattr(current, name), current.processed)
    progress.reset()
    progress.total.ready = progress.total.started = 1
    reset()
    for name in _COUNTERS:
        setattr(progress.total, name, total[name])
