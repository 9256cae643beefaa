"""The state of a run that a checkpoint of Lightning leaves out: capture and restore."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_d9m.control.generators import (
    capture_generators,
    decode_rng,
    encode_rng,
    find_generators,
    restore_generators,
)
from lightning_d9m.control.seeded_dataset import SeededCollate
from lightning_d9m.control.seeding import RngState, restore_rng
from lightning_d9m.lightning import lightning_private
from lightning_d9m.lightning.resume import logged_results
from lightning_d9m.lightning.resume.loop_position import LoopPhase
from lightning_d9m.lightning.resume.metric_state import (
    MetricState,
    capture_metrics,
    find_metrics,
    name_callbacks,
    restore_metrics,
    to_plain,
)

_VALIDATION = "validate."


@dataclass(frozen=True)
class RngAndMetricState:
    """State that an evaluation changes too; an interrupted evaluation is run again as a whole."""

    generators: dict[str, Any]
    measured: MetricState


def capture_drawn(trainer: Any, moment: LoopPhase) -> RngAndMetricState:
    """Return the states of the user's generators and metrics."""
    reset = logged_results.find_metrics_to_reset(trainer, moment)
    return RngAndMetricState(capture_generators(_owners(trainer)), capture_metrics(trainer, reset))


def capture(trainer: Any, rng: RngState, drawn: RngAndMetricState) -> dict[str, Any]:
    """Return the state of this rank as plain values.

    It holds gradients only between two micro-batches that are accumulated.

    Args:
        trainer: The Trainer.
        rng: The generators of training, which an evaluation may have replaced.
        drawn: The states of the user's generators and metrics.
    """
    return {
        "rng": encode_rng(rng),
        "generators": drawn.generators,
        "measured": drawn.measured.as_plain(),
        "metrics": logged_results.capture_latest(trainer),
        "results": logged_results.capture_results(trainer),
        "gradients": _capture_gradients(trainer),
        "reload_epoch": _finite(lightning_private.get_reload_epoch(trainer, "train")),
        "validation_reload_epoch": _finite(lightning_private.get_reload_epoch(trainer, "validate")),
    }


def find_unmatched_state(trainer: Any, rank: Mapping[str, Any]) -> list[str]:
    """Return the paths of generators and metrics that exist only here or only in the checkpoint."""
    generators = set(find_generators(_owners(trainer))) ^ set(rank.get("generators", {}))
    if not lightning_private.has_loaders(trainer.fit_loop.epoch_loop.val_loop):
        generators = {path for path in generators if not path.startswith(_VALIDATION)}
    metrics = set(find_metrics(trainer)) ^ set(rank.get("measured", {}).get("paths", ()))
    return sorted(generators | metrics)


def find_reloaded_generators(trainer: Any, rank: Mapping[str, Any], epoch: int) -> list[str]:
    """Return the generators of loaders that are loaded again for the epoch that is resumed.

    The dataset of the new loader may be a new object, whose generator starts again, or the same
    one, whose generator continues; a resumed run cannot tell.
    """
    every = trainer.reload_dataloaders_every_n_epochs
    found = []
    for stage, key in (("train.", "reload_epoch"), (_VALIDATION, "validation_reload_epoch")):
        loaded = rank.get(key)
        if every and loaded is not None and epoch - loaded >= every:
            found += [path for path in rank.get("generators", {}) if path.startswith(stage)]
    return found


def restore_outside(trainer: Any, rank: Mapping[str, Any]) -> None:
    """Restore state that outlives an epoch. Called once, before the first epoch starts."""
    _restore_drawn(trainer, rank)
    epoch = trainer.fit_loop.epoch_progress.current.processed
    _settle_reload(trainer, "train", rank.get("reload_epoch"), epoch)


def restore_validation(trainer: Any, rank: Mapping[str, Any]) -> None:
    """Restore the state of the validation loaders. Called once, after they were loaded."""
    generators = {
        path: state
        for path, state in rank.get("generators", {}).items()
        if path.startswith(_VALIDATION)
    }
    restore_generators(_owners(trainer), generators)
    saved = rank.get("validation_reload_epoch")
    _settle_reload(trainer, "validate", saved, trainer.current_epoch)


def restore_within(trainer: Any, rank: Mapping[str, Any]) -> None:
    """Restore state that is reset at the start of an epoch.

    Called once, before the first remaining batch of a partly trained epoch.
    """
    _start_averaging(trainer)
    logged_results.restore_results(trainer, rank.get("results", {}))
    _restore_gradients(trainer, rank.get("gradients", {}))
    _restore_drawn(trainer, rank)
    if "rng" in rank:
        restore_rng(decode_rng(rank["rng"]))


def _restore_drawn(trainer: Any, rank: Mapping[str, Any]) -> None:
    restore_generators(_owners(trainer), rank.get("generators", {}))
    if "measured" in rank:
        restore_metrics(trainer, MetricState(**rank["measured"]))


def _settle_reload(
    trainer: Any, stage: Literal["train", "validate"], saved: int | None, epoch: int
) -> None:
    """Set the epoch that counts as the last reload, so that the next reload is due in time."""
    if saved is not None:
        due = epoch - saved >= trainer.reload_dataloaders_every_n_epochs
        lightning_private.set_reload_epoch(trainer, stage, epoch if due else saved)


def _owners(trainer: Any) -> dict[str, object]:
    """Return the user's objects whose generators training may use, by name."""
    owners: dict[str, object] = {
        f"model.{name}" if name else "model": module
        for name, module in trainer.lightning_module.named_modules()
    }
    owners["datamodule"] = trainer.datamodule
    owners |= name_callbacks(trainer.callbacks)
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


def _capture_gradients(trainer: Any) -> dict[str, Any]:
    """Return the gradients to which later micro-batches are added."""
    if not lightning_private.accumulates_gradients(trainer):
        return {}
    return {
        name: to_plain(parameter.grad)
        for name, parameter in trainer.lightning_module.named_parameters()
        if parameter.grad is not None
    }


def _restore_gradients(trainer: Any, gradients: Mapping[str, Tensor]) -> None:
    if not gradients:
        return
    for name, parameter in trainer.lightning_module.named_parameters():
        kept = gradients.get(name)
        parameter.grad = None if kept is None else torch.empty_like(parameter).copy_(kept)


def _start_averaging(trainer: Any) -> None:
    """Start the schedule of stochastic weight averaging, as it does at the start of an epoch.

    Lightning does not call that hook again for a partly trained epoch. The averages themselves are
    in the callback's state.
    """
    for callback in trainer.callbacks:
        if not any(base.__name__ == _AVERAGING for base in type(callback).__mro__):
            continue
        if callback.swa_start <= trainer.current_epoch <= callback.swa_end:
            groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
            rates = [group["lr"] for group in groups]
            callback.on_train_epoch_start(trainer, trainer.lightning_module)
            # A new schedule sets the rates.
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate
