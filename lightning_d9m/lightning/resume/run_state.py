# ruff: noqa: SLF001 - Lightning's loops have no public word for their state
"""The pieces of a run that a checkpoint of Lightning's leaves out, each captured and restored."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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
    """What an evaluation changes too; one that is interrupted is done again, from its beginning."""

    generators: dict[str, Any]
    measured: MetricState


def capture_drawn(trainer: Any, moment: LoopPhase) -> RngAndMetricState:
    """Return the generators and metrics of the user's."""
    reset = logged_results.find_metrics_to_reset(trainer, moment)
    return RngAndMetricState(capture_generators(_owners(trainer)), capture_metrics(trainer, reset))


def capture(trainer: Any, rng: RngState, drawn: RngAndMetricState) -> dict[str, Any]:
    """Return all pieces of this rank as plain values: the generators' states, and a few numbers.

    Only between two micro-batches that are accumulated are there gradients among them.

    Args:
        trainer: The Trainer.
        rng: The generators of training, which may be set aside meanwhile.
        drawn: The generators and metrics of the user's.
    """
    fit = trainer.fit_loop
    return {
        "rng": encode_rng(rng),
        "generators": drawn.generators,
        "measured": drawn.measured.as_plain(),
        "metrics": logged_results.capture_latest(trainer),
        "results": logged_results.capture_results(trainer),
        "gradients": _capture_gradients(trainer),
        "reload_epoch": _finite(fit._last_train_dl_reload_epoch),
        "validation_reload_epoch": _finite(fit.epoch_loop.val_loop._last_val_dl_reload_epoch),
    }


def find_unmatched_state(trainer: Any, rank: Mapping[str, Any]) -> list[str]:
    """Return the generators and metrics that are here and were not saved, or the reverse."""
    generators = set(find_generators(_owners(trainer))) ^ set(rank.get("generators", {}))
    if trainer.fit_loop.epoch_loop.val_loop._combined_loader is None:
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
    """Restore what lives from epoch to epoch; called once, before the first epoch begins."""
    _restore_drawn(trainer, rank)
    fit = trainer.fit_loop
    epoch = fit.epoch_progress.current.processed
    fit._last_train_dl_reload_epoch = _settle_reload(
        trainer, rank.get("reload_epoch"), epoch, fit._last_train_dl_reload_epoch
    )


def restore_validation(trainer: Any, rank: Mapping[str, Any]) -> None:
    """Restore what belongs to the loaders of validation; called when they have been loaded."""
    generators = {
        path: state
        for path, state in rank.get("generators", {}).items()
        if path.startswith(_VALIDATION)
    }
    restore_generators(_owners(trainer), generators)
    loop = trainer.fit_loop.epoch_loop.val_loop
    loop._last_val_dl_reload_epoch = _settle_reload(
        trainer,
        rank.get("validation_reload_epoch"),
        trainer.current_epoch,
        loop._last_val_dl_reload_epoch,
    )


def restore_within(trainer: Any, rank: Mapping[str, Any]) -> None:
    """Restore what an epoch begins with anew; called once, before the next batch of a begun one."""
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


def _settle_reload(trainer: Any, saved: int | None, epoch: int, now: float) -> float:
    """Return when loaders count as loaded that were loaded just now, for this epoch.

    Later ones are due when they were.
    """
    if saved is None:
        return now
    return epoch if epoch - saved >= trainer.reload_dataloaders_every_n_epochs else saved


def _owners(trainer: Any) -> dict[str, object]:
    """Return the objects of the user's whose generators training may draw from, by name."""
    owners: dict[str, object] = {
        f"model.{name}" if name else "model": module
        for name, module in trainer.lightning_module.named_modules()
    }
    owners["datamodule"] = trainer.datamodule
    owners |= name_callbacks(trainer.callbacks)
    fit = trainer.fit_loop
    for stage, loop in (("train", fit), ("validate", fit.epoch_loop.val_loop)):
        loader = loop._combined_loader
        for number, part in enumerate([] if loader is None else loader.flattened):
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
    """Return the gradients that later micro-batches are added to."""
    if not trainer.fit_loop.epoch_loop._should_accumulate():
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
    """Let stochastic weight averaging take its schedule up, as it does when an epoch starts.

    Lightning starts no epoch anew that was under way. The averages themselves are in its state.
    """
    for callback in trainer.callbacks:
        if not any(base.__name__ == _AVERAGING for base in type(callback).__mro__):
            continue
        if callback.swa_start <= trainer.current_epoch <= callback.swa_end:
            groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
            rates = [group["lr"] for group in groups]
            callback.on_train_epoch_start(trainer, trainer.lightning_module)
            # A schedule sets the rates when it is made.
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate
