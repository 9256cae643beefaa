"""Reasons why a run cannot be resumed exactly from a checkpoint, one sentence for each.

The run that saves a checkpoint knows some of them and stores them in it; the run that loads it
finds the others.
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from lightning_d9m.control.data.resumable_sampler import find_epoch_problem, find_loader_problems
from lightning_d9m.hashing.shards import find_hybrid_sharding
from lightning_d9m.lightning import lightning_private
from lightning_d9m.lightning.packages import rank_zero
from lightning_d9m.lightning.saved_state import LOGICAL_RANKS_KEY, LoopPosition, SavedState
from lightning_d9m.lightning.trainer_attributes import Trainer, get_logical_ranks

if TYPE_CHECKING:
    from lightning_d9m.lightning.trainer_session import TrainerSession


# The settings that select the random streams. (The others change speed, or are in the ledger.)
_RNG_SETTINGS = ("seed", "per_sample_rng")

STOPPED = ("trainer.should_stop", "Lightning begins the next epoch when it resumes; a longer fit")
CUT = "hooks at the end of the epoch or the fit changed {}, where a longer fit"
LOST_TENSOR = (
    "The checkpoint lacks {!r}, which changes in the fit, as that of ModelPruning lacks the masks "
    "of pruned weights, which would be trained again. Save all weights and buffers that change."
)
LATE_HOOK = (
    "A hook that runs after the checkpoint is saved, such as the module's on_train_batch_end, "
    "changes {}, and a resumed run does not call it again. Do it in a callback's "
    "on_train_batch_end, or save checkpoints at the end of an epoch."
)
IN_VALIDATION = (
    "The checkpoint was saved within a validation that had changed {}, and a resumed run begins "
    "the validation again. Use one that was saved before it or after it."
)
WITHOUT_STEPS = (
    "It was saved in an epoch that trains nothing, in which StochasticWeightAveraging only reads "
    "the statistics of batch normalization, and a resumed run would train that epoch. Use one that "
    "was saved at the end of an epoch."
)
OTHER_SCHEDULERS = (
    "The checkpoint was saved with the learning rate schedulers {}, and this run has {}. A "
    "callback that replaces one in on_train_epoch_start must keep it in an attribute; one that "
    "does so in another hook must do it again when it is resumed."
)
NOT_HELD = (
    "{} changes while samples are read, and a checkpoint does not hold it. A resumed run begins "
    "without it; if samples depend on what it holds, they differ."
)
UNMATCHED_GENERATORS = (
    "These generators are only in the checkpoint, or only in this run: {}. Create them before "
    "training starts, as in the run that saved the checkpoint."
)
MISSING_OBJECTS = (
    "The checkpoint holds values of objects that this run lacks, or that take others: {}. Create "
    "them before training starts, as in the run that saved the checkpoint."
)
RELOADED = (
    "The loaders are loaded again for the epoch that is resumed "
    "(reload_dataloaders_every_n_epochs), and their datasets or samplers keep generators, or "
    "values that change: {}. Whether these continue or start again cannot be known. Keep "
    "generators in the module or the datamodule, or draw from those of Python, NumPy or torch; "
    "take the epoch from set_epoch()."
)
LOST_PROGRESS = (
    "The fit begins at step {}, and the checkpoint was saved at step {}: a callback such as "
    "LearningRateFinder or BatchSizeFinder has loaded a checkpoint since, and Lightning forgets "
    "the first one then. Resume without that callback."
)
REPEATED_START = (
    "Epoch {} had {} batches{}: its loader began at the position that it has from the checkpoint. "
    "Call the dataset's set_epoch() when an epoch starts, if it has one; or save checkpoints at "
    "the end of an epoch, and load with a loader that has no state_dict()."
)


def name_all(problem: str, paths: Iterable[str]) -> list[str]:
    """Return a problem with the paths in it; nothing without paths."""
    named = ", ".join(paths)
    return [problem.format(named)] if named else []


def describe_unfinished(trainer: Trainer, epoch: int, cause: str, then: str) -> str:
    """Return why an epoch that the end of a fit cut short cannot go on."""
    trained = trainer.fit_loop.epoch_loop.batch_progress.current.completed
    return (
        f"Its fit ended after {trained} batches of epoch {epoch}, by {cause}, and {then} would "
        "train the rest. Resume from a checkpoint within the epoch: "
        "ModelCheckpoint(every_n_train_steps=...)."
    )


def find_missing_state(trainer: Trainer, position: LoopPosition) -> list[str]:
    """Return why a checkpoint that is being saved cannot be resumed exactly."""
    between, fit = position.phase == "epoch", trainer.fit_loop
    if not between and lightning_private.skips_backward(trainer):
        return [WITHOUT_STEPS]
    within = not between and not is_at_end(trainer)
    found = [
        problem
        for loop, is_within in ((fit, within), (fit.epoch_loop.val_loop, False))
        for loader in lightning_private.list_loaders(loop)
        for problem in find_loader_problems(loader, within=is_within)
    ]
    if between and trainer.should_stop and _has_batches_left(trainer):
        found.append(describe_unfinished(trainer, position.epoch - 1, *STOPPED))
    # Lightning loads the state of a loader in a fit of a number of steps.
    if between and trainer.max_steps < 0:
        found += filter(None, map(find_epoch_problem, lightning_private.list_loaders(fit)))
    return found


def is_cut_by_max_steps(trainer: Trainer) -> bool:
    """Return whether ``max_steps`` has ended the fit, and batches of the epoch are left."""
    by_steps = reaches_max_steps(trainer, trainer.global_step) and not trainer.should_stop
    return by_steps and _has_batches_left(trainer)


def _has_batches_left(trainer: Trainer) -> bool:
    # A batch that `on_train_batch_start` has skipped, which ends the epoch in every run, is ready
    # and not completed.
    batches = trainer.fit_loop.epoch_loop.batch_progress.current
    return 0 < batches.completed == batches.ready and not is_at_end(trainer)


def report(checkpoint: str, problems: list[str]) -> None:
    """Log problems of a checkpoint that this run saves."""
    listed = "\n- ".join(problems)
    rank_zero().rank_zero_info(f"{checkpoint} cannot be resumed exactly:\n- {listed}")


def describe_settings(trainer: Trainer, session: "TrainerSession") -> dict[str, Any]:
    """Return the settings in a checkpoint, which ``find_resume_problems`` compares with a run's."""
    settings: dict[str, Any] = dict(session.settings.as_record())
    logical_ranks = get_logical_ranks(trainer)
    return settings if logical_ranks is None else {**settings, LOGICAL_RANKS_KEY: logical_ranks}


def find_resume_problems(
    state: SavedState, trainer: Trainer, settings: Mapping[str, object]
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
    problems += filter(None, [find_hybrid_sharding([trainer.strategy])])
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


def is_at_end(trainer: Trainer) -> bool:
    """Return whether no batch of the epoch is left."""
    return bool(trainer.fit_loop.epoch_loop.batch_progress.is_last_batch)


def reaches_max_steps(trainer: Trainer, step: int) -> bool:
    """Return whether the fit has no step left after this one."""
    return bool(0 <= trainer.max_steps <= step)  # -1: unlimited
