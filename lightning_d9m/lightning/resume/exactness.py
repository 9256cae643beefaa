# ruff: noqa: SLF001 - Lightning's loops have no public word for their loaders
"""Why a run cannot go on exactly where a checkpoint was saved, one sentence for each reason.

Some reasons are known to the run that saves: they are kept in the checkpoint, as what it lacks. The
others are seen by the run that loads it.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from lightning_d9m.control.resumable_sampler import find_position_problem, find_worker_problem
from lightning_d9m.lightning.resume.loop_position import LoopPosition
from lightning_d9m.lightning.resume.metric_state import MetricState

FORMAT = 2
# What decides which numbers are drawn. (Other settings change speed, or are told by the ledger.)
_DRAWN = ("seed", "per_sample_rng")


def find_missing_state(trainer: Any, place: LoopPosition, measured: MetricState) -> list[str]:
    """Return what a checkpoint that is being saved cannot hold."""
    found = [
        f"The checkpoint holds no states of the metric {path}, {why}. Save checkpoints at the end "
        "of an epoch, or let the metric keep less."
        for path, why in measured.left_out.items()
    ]
    fit = trainer.fit_loop
    within = place.moment != "epoch" and not is_at_end(trainer)
    for loader in _loaders_of(fit):
        found += _listed(
            find_position_problem(loader) if within else find_unsaved_loader_state(loader)
        )
    for loader in _loaders_of(fit.epoch_loop.val_loop):
        found += _listed(find_unsaved_loader_state(loader))
    return found


def find_unsaved_loader_state(loader: Any) -> str | None:
    """Return why what a loader draws from epoch to epoch cannot be saved."""
    return find_worker_problem(loader) if getattr(loader, "persistent_workers", False) else None


def find_unresumable_loaders(trainer: Any) -> list[str]:
    """Return why checkpoints that a fit saves within an epoch could not be resumed exactly."""
    fit = trainer.fit_loop
    found = [
        find_position_problem(loader) or find_unsaved_loader_state(loader)
        for loader in _loaders_of(fit)
    ]
    found += [find_unsaved_loader_state(loader) for loader in _loaders_of(fit.epoch_loop.val_loop)]
    return [problem for problem in found if problem is not None]


def saves_within_epochs(trainer: Any) -> bool:
    """Return whether a callback of the Trainer's says that it saves in the middle of an epoch."""
    return any(
        getattr(callback, "_every_n_train_steps", 0)
        or getattr(callback, "_train_time_interval", None) is not None
        or getattr(callback, "save_on_exception", False)
        or trainer.val_check_interval != 1.0
        for callback in trainer.checkpoint_callbacks
    )


def find_problems(state: object, trainer: Any, settings: Mapping[str, object]) -> list[str]:
    """Return why a run cannot be resumed exactly from a state that a checkpoint holds.

    Args:
        state: What the checkpoint holds under our key.
        trainer: The Trainer.
        settings: Those of the run that is to go on.
    """
    if not isinstance(state, Mapping):
        return [
            "The checkpoint holds no state of lightning_d9m: DeterminismCallback was not there."
        ]
    if state.get("format") != FORMAT:
        found = state.get("format")
        return [f"The checkpoint's state has format {found!r}; this version reads {FORMAT}."]
    problems = [
        f"It was saved with {name}={expected!r}; now it is {settings.get(name)!r}."
        for name, expected in state["settings"].items()
        if settings.get(name) != expected and name in _DRAWN
    ]
    if is_other_world(state, trainer):
        problems.append(
            f"It was saved by {state['world_size']} ranks; now there are {trainer.world_size}, "
            "which see other data."
        )
    place = state["place"]
    if place["moment"] == "within":
        problems.append(
            f"It was saved while batch {place['batch']} of epoch {place['epoch']} was trained, so "
            "that what the batch had changed by then is in it, and is done again."
        )
    # Of all ranks, so that they agree.
    lacks = (lack for rank in state["ranks"] for lack in rank["lacks"])
    return [*problems, *dict.fromkeys(lacks)]


def describe_strangers(paths: Iterable[str]) -> list[str]:
    """Return why generators and metrics cannot be restored that are not those that were saved."""
    named = ", ".join(paths)
    if not named:
        return []
    problem = (
        f"These generators or metrics were saved and are not here, or the reverse: {named}. "
        "Make them before training starts, where they were in the run that saved the checkpoint."
    )
    return [problem]


def describe_reloaded_generators(paths: Iterable[str]) -> list[str]:
    """Return why generators of loaders that are loaded again cannot be restored."""
    named = ", ".join(paths)
    if not named:
        return []
    problem = (
        "The loaders are loaded again for the epoch that is resumed "
        f"(reload_dataloaders_every_n_epochs), and their datasets keep generators: {named}. "
        "Whether these continue or start again cannot be known. Keep them in the module or the "
        "datamodule, or draw from the generators of Python, NumPy or torch."
    )
    return [problem]


def is_other_world(state: Mapping[str, Any], trainer: Any) -> bool:
    """Return whether a state was saved by another number of ranks."""
    return bool(state["world_size"] != trainer.world_size)


def is_at_end(trainer: Any) -> bool:
    """Return whether no batch of the epoch is left, so that no place among them is needed."""
    return bool(trainer.fit_loop.epoch_loop.batch_progress.is_last_batch)


def _loaders_of(loop: Any) -> Iterator[Any]:
    loader = loop._combined_loader
    yield from [] if loader is None else loader.flattened


def _listed(problem: str | None) -> list[str]:
    return [] if problem is None else [problem]
