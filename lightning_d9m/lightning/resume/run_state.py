"""The state of a run that a checkpoint of Lightning leaves out: capture and restore."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from lightning_d9m.control.data.dataset_numbers import NUMBERS
from lightning_d9m.control.data.resumable_sampler import unwrap
from lightning_d9m.control.data.sampler_state import CHANGES
from lightning_d9m.control.data.seeded_dataset import SeededCollate
from lightning_d9m.control.seeding import (
    capture_generators,
    decode_rng,
    encode_rng,
    find_lost_devices,
    restore_generators,
    restore_rng,
)
from lightning_d9m.hashing.shards import has_base
from lightning_d9m.hashing.training_state import ModelTensors
from lightning_d9m.lightning import lightning_private
from lightning_d9m.lightning.logical_ranks.steps import get_logical_steps
from lightning_d9m.lightning.packages import rank_zero
from lightning_d9m.lightning.resume import logged_results
from lightning_d9m.lightning.resume.gradients import capture_gradients, restore_gradients
from lightning_d9m.lightning.resume.program_state import ProgramState
from lightning_d9m.lightning.saved_state import (
    FROZEN,
    VALIDATION,
    LoopPhase,
    SavedRank,
    SavedState,
)
from lightning_d9m.lightning.trainer_attributes import (
    get_epoch_counts,
    get_reload_interval,
    list_callbacks,
)
from lightning_d9m.lightning.trainer_ranks import ranks_of
from lightning_d9m.state.plain_data import decode_plain, encode_plain
from lightning_d9m.state.search import find_generators
from lightning_d9m.text import pluralize

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

    from lightning_d9m.lightning.trainer_session import TrainerSession

# They hold the whole state in almost every training, so that ranks wait for each other once.
_FIRST_BYTES = 64 * 2**10


@dataclass(frozen=True)
class UserState:
    """State that an evaluation changes too; an interrupted evaluation is run again as a whole.

    Attributes:
        generators: The states of the generators that datasets of loaders hold, by path.
        reset: The metrics that Lightning is about to reset, of which nothing is saved.
        by_logical_rank: The states of metrics by path and logical rank.
        program: What ``ProgramState.capture`` returned.
    """

    generators: dict[str, Any]
    reset: list[str]
    by_logical_rank: dict[str, dict[int, Any]]
    program: tuple[dict[str, bytes], list[str]]


def capture_user_state(trainer: "Trainer", phase: LoopPhase, program: ProgramState) -> UserState:
    """Return the states of the user's generators, metrics and other objects."""
    reset = logged_results.find_metrics_to_reset(trainer, phase)
    found, unknown = program.capture()
    skipped = tuple(f"model.{name}." for name in reset)
    logical = get_logical_steps(trainer)
    by_logical_rank = {} if logical is None else logical.metrics.capture()
    return UserState(
        capture_generators(_name_datasets(trainer)),
        reset,
        {path: s for path, s in by_logical_rank.items() if not f"{path}.".startswith(skipped)},
        ({path: data for path, data in found.items() if not path.startswith(skipped)}, unknown),
    )


def capture(
    trainer: "Trainer", session: "TrainerSession", user: UserState, phase: LoopPhase
) -> SavedRank:
    """Return the state of this rank that is read from the Trainer and the session.

    Between epochs it has neither the generators of training, which an epoch seeds, nor the results
    of the epoch that has ended: ``restore_within`` alone reads them.
    """
    logical = get_logical_steps(trainer)
    within = phase != "epoch"
    return SavedRank(
        rng=encode_rng(session.capture_rng()) if within else None,
        generators=user.generators,
        reset=user.reset,
        callback_metrics=logged_results.capture_latest(trainer),
        results=logged_results.capture_results(trainer) if within else [],
        gradients=capture_gradients(trainer),
        train_reload_epoch=_finite(lightning_private.get_reload_epoch(trainer, "train")),
        validation_reload_epoch=_finite(lightning_private.get_reload_epoch(trainer, "validate")),
        logged=[] if logical is None else [logical.logged.capture()],
        metric_states=user.by_logical_rank,
    )


def gather_ranks(trainer: "Trainer", state: SavedState) -> SavedState:
    """Return a state with those of all ranks, on rank 0; every rank calls this."""
    if trainer.world_size == 1:
        return state
    (own,) = state.ranks
    rows = ranks_of(trainer).gather_bytes(
        encode_plain(own.as_plain()), first=_FIRST_BYTES, on_first_rank=True
    )
    if not trainer.is_global_zero:
        return state
    others = {
        rank: SavedRank.from_plain(decode_plain(row))
        for rank, row in enumerate(rows)
        if rank != trainer.global_rank
    }
    return replace(state, ranks=[others.get(rank, own) for rank in range(len(rows))])


def find_unmatched_state(trainer: "Trainer", rank: SavedRank) -> list[str]:
    """Return the paths of generators that datasets hold only here or only in the checkpoint."""
    generators = set(find_generators(_name_datasets(trainer))) ^ set(rank.generators)
    if not lightning_private.has_loaders(trainer.fit_loop.epoch_loop.val_loop):
        generators = {path for path in generators if not path.startswith(VALIDATION)}
    return sorted(generators)


def find_lost_generators(rank: SavedRank) -> list[str]:
    """Return why generators of devices cannot be restored."""
    return [] if rank.rng is None else find_lost_devices(rank.rng)


def find_reloaded_generators(trainer: "Trainer", rank: SavedRank, epoch: int) -> list[str]:
    """Return the generators and numbers of loaders that are loaded again for the resumed epoch.

    The dataset of the new loader may be a new object, whose generator starts again, or the same
    one, whose generator continues; a resumed run cannot tell.
    """
    every = get_reload_interval(trainer)
    found = []
    loaded_epochs = {
        "train.": rank.train_reload_epoch,
        VALIDATION: rank.validation_reload_epoch,
    }
    for stage, loaded in loaded_epochs.items():
        if every and loaded is not None and epoch - loaded >= every:
            found += [path for path in rank.generators if path.startswith(stage)]
            found += [path for path in _name_sampler_states(rank) if path.startswith(stage)]
    return found


def _name_sampler_states(rank: SavedRank) -> Iterator[str]:
    """Yield the paths of what is saved of the samplers and datasets of loaders."""
    for number, states in rank.samplers.items():
        loader = number if number.startswith(VALIDATION) else f"train.{number}"
        for kind, values in states.items():
            if kind == NUMBERS:
                yield from (f"{loader}.{path}.{name}" for path in values for name in values[path])
            elif kind == CHANGES:
                found = (path.partition(".")[2].rstrip("'") for path in values)
                yield from (f"{loader}.sampler.{name}" for name in found)


def restore_outside(
    trainer: "Trainer", session: "TrainerSession", rank: SavedRank, report: Callable[[str], None]
) -> None:
    """Restore state that outlives an epoch. Called once, before the first epoch starts.

    ``report`` is called with a problem that training finds later; see ``restore_gradients``.
    """
    _restore_rng_and_metrics(trainer, rank)
    session.restore_validation(rank.samplers)  # again, after a sanity check
    restore_gradients(trainer, rank.gradients, report)
    epoch = get_epoch_counts(trainer).processed
    _settle_reload(trainer, "train", rank.train_reload_epoch, epoch)


def restore_validation(trainer: "Trainer", session: "TrainerSession", rank: SavedRank) -> None:
    """Restore the state of the validation loaders. Called once, after they were loaded."""
    session.restore_validation(rank.samplers)
    generators = {
        path: state for path, state in rank.generators.items() if path.startswith(VALIDATION)
    }
    restore_generators(_name_datasets(trainer), generators)
    saved = rank.validation_reload_epoch
    _settle_reload(trainer, "validate", saved, trainer.current_epoch)


def restore_within(trainer: "Trainer", rank: SavedRank, report: Callable[[str], None]) -> None:
    """Restore state that is reset at the start of an epoch, as ``restore_outside`` does.

    Called once, before the first remaining batch of a partly trained epoch.
    """
    _start_schedules(trainer)
    logged_results.restore_results(trainer, rank.results)
    if (logical := get_logical_steps(trainer)) is not None:
        logical.logged.restore(rank.logged, here=trainer.is_global_zero)
    restore_gradients(trainer, rank.gradients, report)
    _restore_rng_and_metrics(trainer, rank)
    if rank.rng is not None:
        restore_rng(decode_rng(rank.rng))


def _restore_rng_and_metrics(trainer: "Trainer", rank: SavedRank) -> None:
    restore_generators(_name_datasets(trainer), rank.generators)
    if (logical := get_logical_steps(trainer)) is not None:
        logical.metrics.restore(rank.metric_states)


def _settle_reload(
    trainer: "Trainer", stage: Literal["train", "validate"], saved: int | None, epoch: int
) -> None:
    """Set the epoch that counts as the last reload, so that the next reload is due in time."""
    if saved is not None:
        due = epoch - saved >= get_reload_interval(trainer)
        lightning_private.set_reload_epoch(trainer, stage, epoch if due else saved)


def _name_datasets(trainer: "Trainer") -> dict[str, object]:
    """Return the datasets and functions of the loaders, by name."""
    owners: dict[str, object] = {}
    fit = trainer.fit_loop
    for stage, loop in (("train", fit), ("validate", fit.epoch_loop.val_loop)):
        for number, part in enumerate(lightning_private.list_loaders(loop)):
            dataset, collate = getattr(part, "dataset", None), getattr(part, "collate_fn", None)
            owners[f"{stage}.{number}.dataset"] = unwrap(dataset)
            owners[f"{stage}.{number}.collate_fn"] = (
                collate.user_function if type(collate) is SeededCollate else collate
            )
    return owners


def _finite(epoch: float) -> int | None:
    return None if epoch == float("-inf") else int(epoch)


def capture_frozen(model: ModelTensors) -> dict[str, dict[str, list[str]]]:
    """Return the names of frozen parameters, as settings of the run.

    Callbacks and hooks freeze and unfreeze them at the start of an epoch.
    """
    parameters = [name for name, tensor in model.listed[0] if not tensor.requires_grad]
    return {FROZEN: {"parameters": parameters}}


def restore_frozen(trainer: "Trainer", settings: Mapping[str, Any]) -> None:
    """Freeze and unfreeze what was so when ``capture_frozen`` was called, and log what changed."""
    frozen = settings[FROZEN]
    module = trainer.lightning_module
    changed = []
    for name, parameter in module.named_parameters():
        if parameter.requires_grad == (name in frozen["parameters"]):
            parameter.requires_grad_(not parameter.requires_grad)
            changed.append(name)
    if changed:
        rank_zero().rank_zero_info(
            f"{pluralize(len(changed), 'parameter')} frozen or unfrozen as when the checkpoint was "
            f"saved, {changed[0]} first. To train others, load its weights without ckpt_path."
        )


def _start_schedules(trainer: "Trainer") -> None:
    """Let callbacks schedule accumulation and averaging, as they do at the start of an epoch.

    Lightning does not call that hook again for a partly trained epoch. The averages themselves are
    in the callback's state.
    """
    groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
    rates = [group["lr"] for group in groups]
    callback: Any
    for callback in list_callbacks(trainer):
        averages = has_base(callback, "StochasticWeightAveraging")
        if averages and not callback.swa_start <= trainer.current_epoch <= callback.swa_end:
            continue
        if averages or has_base(callback, "GradientAccumulationScheduler"):
            callback.on_train_epoch_start(trainer, trainer.lightning_module)
    # A new schedule sets the rates.
    for group, rate in zip(groups, rates, strict=True):
        group["lr"] = rate
