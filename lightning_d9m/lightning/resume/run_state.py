"""The state of a run that a checkpoint of Lightning leaves out: capture and restore."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from lightning_d9m.control.data.dataset_numbers import NUMBERS
from lightning_d9m.control.data.sampler_state import ATTRIBUTES
from lightning_d9m.control.data.seeded_dataset import SeededCollate
from lightning_d9m.control.generators import (
    capture_generators,
    decode_rng,
    encode_rng,
    find_generators,
    find_lost_devices,
    restore_generators,
)
from lightning_d9m.control.seeding import restore_rng
from lightning_d9m.hashing.shards import has_base
from lightning_d9m.lightning import lightning_private
from lightning_d9m.lightning.packages import rank_zero
from lightning_d9m.lightning.ranks.trainer_ranks import ranks_of
from lightning_d9m.lightning.resume import logged_results
from lightning_d9m.lightning.resume.gradients import capture_gradients, restore_gradients
from lightning_d9m.lightning.resume.metric_state import (
    capture_metrics,
    find_metrics,
    name_callbacks,
    restore_metrics,
)
from lightning_d9m.lightning.resume.model_parts import ModelParts
from lightning_d9m.lightning.saved_state import (
    FROZEN,
    VALIDATION,
    LoopPhase,
    SavedMetrics,
    SavedRank,
    SavedState,
)
from lightning_d9m.lightning.trainer_attributes import (
    get_datamodule,
    get_epoch_counts,
    get_logical_steps,
    get_reload_interval,
    list_callbacks,
)
from lightning_d9m.state.plain_data import decode_plain, encode_plain
from lightning_d9m.text import pluralize

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

    from lightning_d9m.lightning.trainer_session import TrainerSession

# They hold the whole state in almost every training, so that ranks wait for each other once.
_FIRST_BYTES = 64 * 2**10


@dataclass(frozen=True)
class RngAndMetricState:
    """State that an evaluation changes too; an interrupted evaluation is run again as a whole.

    Attributes:
        generators: The state of each of the user's generators, by path.
        metrics: The states of metrics.
        left_out: The reason why a metric was left out, by path, as the end of a sentence.
        by_logical_rank: The states of metrics by path and logical rank.
    """

    generators: dict[str, Any]
    metrics: SavedMetrics
    left_out: dict[str, str]
    by_logical_rank: dict[str, dict[int, Any]]


def capture_rng_and_metrics(
    trainer: "Trainer", model: ModelParts, phase: LoopPhase
) -> RngAndMetricState:
    """Return the states of the user's generators and metrics."""
    reset = logged_results.find_metrics_to_reset(trainer, phase)
    logical = get_logical_steps(trainer)
    return RngAndMetricState(
        capture_generators(_name_owners(trainer, model.searched)),
        *capture_metrics(trainer, model, reset),
        {} if logical is None else logical.metrics.capture(),
    )


def capture(
    trainer: "Trainer", session: "TrainerSession", user: RngAndMetricState, phase: LoopPhase
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
        metrics=user.metrics,
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
    """Return the paths of generators and metrics that exist only here or only in the checkpoint."""
    generators = set(find_generators(_name_owners(trainer))) ^ set(rank.generators)
    if not lightning_private.has_loaders(trainer.fit_loop.epoch_loop.val_loop):
        generators = {path for path in generators if not path.startswith(VALIDATION)}
    metrics = set(find_metrics(trainer)) ^ set(rank.metrics.paths)
    return sorted(generators | metrics)


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
            elif kind == ATTRIBUTES:
                yield from (f"{loader}.sampler.{name}" for own in values.values() for name in own)
            else:
                yield f"{loader}.sampler.{kind}"


def restore_outside(
    trainer: "Trainer", session: "TrainerSession", rank: SavedRank, report: Callable[[str], None]
) -> None:
    """Restore state that outlives an epoch. Called once, before the first epoch starts.

    ``report`` is called with a problem that training finds later; see ``restore_gradients``.
    """
    _set_accumulation(trainer)
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
    restore_generators(_name_owners(trainer), generators)
    saved = rank.validation_reload_epoch
    _settle_reload(trainer, "validate", saved, trainer.current_epoch)


def restore_within(trainer: "Trainer", rank: SavedRank, report: Callable[[str], None]) -> None:
    """Restore state that is reset at the start of an epoch, as ``restore_outside`` does.

    Called once, before the first remaining batch of a partly trained epoch.
    """
    _start_averaging(trainer)
    logged_results.restore_results(trainer, rank.results)
    if (logical := get_logical_steps(trainer)) is not None:
        logical.logged.restore(rank.logged, here=trainer.is_global_zero)
    restore_gradients(trainer, rank.gradients, report)
    _restore_rng_and_metrics(trainer, rank)
    if rank.rng is not None:
        restore_rng(decode_rng(rank.rng))


def _restore_rng_and_metrics(trainer: "Trainer", rank: SavedRank) -> None:
    restore_generators(_name_owners(trainer), rank.generators)
    if (logical := get_logical_steps(trainer)) is not None:
        logical.metrics.restore(rank.metric_states)
    restore_metrics(trainer, rank.metrics)


def _settle_reload(
    trainer: "Trainer", stage: Literal["train", "validate"], saved: int | None, epoch: int
) -> None:
    """Set the epoch that counts as the last reload, so that the next reload is due in time."""
    if saved is not None:
        due = epoch - saved >= get_reload_interval(trainer)
        lightning_private.set_reload_epoch(trainer, stage, epoch if due else saved)


def _name_owners(
    trainer: "Trainer", modules: Mapping[str, object] | None = None
) -> dict[str, object]:
    """Return the user's objects whose generators training may use, by name.

    ``modules`` are those that may hold generators, if they are known.
    """
    if modules is None:
        modules = dict(trainer.lightning_module.named_modules())
    owners = {f"model.{name}" if name else "model": module for name, module in modules.items()}
    owners["datamodule"] = get_datamodule(trainer)
    owners |= name_callbacks(list_callbacks(trainer))
    fit = trainer.fit_loop
    for stage, loop in (("train", fit), ("validate", fit.epoch_loop.val_loop)):
        for number, part in enumerate(lightning_private.list_loaders(loop)):
            dataset, collate = getattr(part, "dataset", None), getattr(part, "collate_fn", None)
            owners[f"{stage}.{number}.dataset"] = getattr(dataset, "_dataset", dataset)
            owners[f"{stage}.{number}.collate_fn"] = (
                collate.user_function if type(collate) is SeededCollate else collate
            )
    return owners


def _finite(epoch: float) -> int | None:
    return None if epoch == float("-inf") else int(epoch)


_AVERAGING = "StochasticWeightAveraging"
_ACCUMULATION = "GradientAccumulationScheduler"


def _set_accumulation(trainer: "Trainer") -> None:
    """Let a scheduler of gradient accumulation set the number of a partly trained epoch.

    Lightning does not call its hook again, see below.
    """
    for callback in list_callbacks(trainer):
        if has_base(callback, _ACCUMULATION):
            callback.on_train_epoch_start(trainer, trainer.lightning_module)


def capture_frozen(model: ModelParts) -> dict[str, dict[str, list[str]]]:
    """Return the names of frozen parameters, and of batch norms without running statistics.

    Callbacks and hooks freeze and unfreeze them at the start of an epoch.

    Returns:
        Settings of the run, as ``SavedState`` has them.
    """
    parameters = [name for name, tensor in model.parameters if not tensor.requires_grad]
    kinds = set(map(type, model.modules.values()))
    # Not of each module: torch formats an error where there is none, which takes long.
    without = {kind for kind in kinds if not getattr(kind, "track_running_stats", True)}
    statistics = [
        name
        for name, module in model.modules.items()
        if not vars(module).get("track_running_stats", type(module) not in without)
    ]
    return {FROZEN: {"parameters": parameters, "statistics": statistics}}


def restore_frozen(trainer: "Trainer", settings: Mapping[str, Any]) -> None:
    """Freeze and unfreeze what was so when ``capture_frozen`` was called, and log what changed."""
    frozen = settings.get(FROZEN)
    if frozen is None:  # saved by an earlier version
        return
    module = trainer.lightning_module
    changed = []
    for name, parameter in module.named_parameters():
        if parameter.requires_grad == (name in frozen["parameters"]):
            parameter.requires_grad_(not parameter.requires_grad)
            changed.append(name)
    for name, part in module.named_modules():
        if hasattr(part, "track_running_stats"):
            part.track_running_stats = name not in frozen["statistics"]
    if changed:
        rank_zero().rank_zero_info(
            f"{pluralize(len(changed), 'parameter')} frozen or unfrozen as when the checkpoint was "
            f"saved, {changed[0]} first. To train others, load its weights without ckpt_path."
        )


def _start_averaging(trainer: "Trainer") -> None:
    """Start the schedule of stochastic weight averaging, as it does at the start of an epoch.

    Lightning does not call that hook again for a partly trained epoch. The averages themselves are
    in the callback's state.
    """
    callback: Any
    for callback in list_callbacks(trainer):
        if not has_base(callback, _AVERAGING):
            continue
        if callback.swa_start <= trainer.current_epoch <= callback.swa_end:
            groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
            rates = [group["lr"] for group in groups]
            callback.on_train_epoch_start(trainer, trainer.lightning_module)
            # A new schedule sets the rates.
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate
