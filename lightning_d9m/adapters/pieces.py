# ruff: noqa: SLF001 - Lightning has no public word for what it has logged so far
"""The pieces of a run that a checkpoint of Lightning's leaves out, each captured and restored."""

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_d9m.control.generators import (
    capture_generators,
    decode_rng,
    encode_rng,
    restore_generators,
)
from lightning_d9m.control.samples import SeededCollate
from lightning_d9m.control.seeding import RngState, restore_rng


def capture(trainer: Any, rng: RngState) -> dict[str, Any]:
    """Return all pieces of this rank as plain values: the generators' states, and a few numbers.

    Only between two micro-batches that are accumulated are there gradients among them.

    Args:
        trainer: The Trainer.
        rng: The generators of training, which may be set aside meanwhile.
    """
    return {
        "rng": encode_rng(rng),
        "generators": capture_generators(_owners(trainer)),
        "metrics": _capture_metrics(trainer),
        "results": _capture_results(trainer),
        "gradients": _capture_gradients(trainer),
        "reload_epoch": _finite(trainer.fit_loop._last_train_dl_reload_epoch),
    }


def restore_metrics(trainer: Any, rank: Mapping[str, Any]) -> None:
    """Restore the metrics that callbacks and schedulers look at."""
    device = trainer.strategy.root_device
    moved = {name: value.to(device) for name, value in rank.get("metrics", {}).items()}
    trainer._logger_connector._callback_metrics.update(moved)


def restore_outside(trainer: Any, rank: Mapping[str, Any]) -> None:
    """Restore what lives from epoch to epoch; called once, before training starts."""
    restore_generators(_owners(trainer), rank.get("generators", {}))
    loaded = rank.get("reload_epoch")
    if loaded is not None:
        # The loaders have just been loaded, for this epoch; later ones are due when they were.
        epoch = trainer.fit_loop.epoch_progress.current.processed
        due = epoch - loaded >= trainer.reload_dataloaders_every_n_epochs
        trainer.fit_loop._last_train_dl_reload_epoch = epoch if due else loaded


def restore_within(trainer: Any, rank: Mapping[str, Any]) -> None:
    """Restore what an epoch begins with anew; called once, before the next batch of a begun one."""
    _start_averaging(trainer)
    _restore_results(trainer, rank.get("results", {}))
    _restore_gradients(trainer, rank.get("gradients", {}))
    restore_generators(_owners(trainer), rank.get("generators", {}))
    if "rng" in rank:
        restore_rng(decode_rng(rank["rng"]))


def _owners(trainer: Any) -> dict[str, object]:
    """Return the objects of the user's whose generators training may draw from, by name."""
    owners: dict[str, object] = {
        f"model.{name}" if name else "model": module
        for name, module in trainer.lightning_module.named_modules()
    }
    owners["datamodule"] = trainer.datamodule
    owners |= {f"callbacks.{n}": callback for n, callback in enumerate(trainer.callbacks)}
    fit = trainer.fit_loop
    for stage, loop in (("train", fit), ("validate", fit.epoch_loop.val_loop)):
        loader = loop._combined_loader
        for number, part in enumerate([] if loader is None else loader.flattened):
            dataset, collate = getattr(part, "dataset", None), getattr(part, "collate_fn", None)
            owners[f"{stage}.{number}.dataset"] = getattr(dataset, "_dataset", dataset)
            owners[f"{stage}.{number}.collate_fn"] = (
                collate.users if type(collate) is SeededCollate else collate
            )
    return owners


def _finite(epoch: float) -> int | None:
    return None if epoch == float("-inf") else int(epoch)


def _capture_metrics(trainer: Any) -> dict[str, Any]:
    """Return the metrics that callbacks look at: those of an earlier validation too."""
    return {
        name: _plain(value)
        for name, value in trainer.callback_metrics.items()
        if isinstance(value, Tensor)
    }


_AVERAGING = "StochasticWeightAveraging"
_META = (
    "fx",
    "name",
    "prog_bar",
    "logger",
    "on_step",
    "on_epoch",
    "enable_graph",
    "add_dataloader_idx",
    "dataloader_idx",
    "metric_attribute",
)


def _capture_results(trainer: Any) -> dict[str, Any]:
    """Return the sums from which the epoch's means of what was logged are made at its end."""
    found = {}
    for key, metric in trainer.fit_loop.epoch_loop._results.items():
        if not metric.is_tensor or not isinstance(metric.value, Tensor):
            continue
        meta = metric.meta
        found[key] = {
            "meta": {name: getattr(meta, name) for name in _META},
            "reduce_fx": meta.reduce_fx.__name__,
            "sync": meta.sync.should,
            "rank_zero_only": meta.sync.rank_zero_only,
            "value": _plain(metric.value),
            "count": _plain(getattr(metric, "cumulated_batch_size", None)),
            "cache": _plain(metric._forward_cache),
            "updates": metric._update_count,
            "has_reset": metric.has_reset,
        }
    return found


def _restore_results(trainer: Any, results: Mapping[str, Any]) -> None:
    # Else the first batch resets what was restored.
    trainer._logger_connector._first_loop_iter = False
    collection = trainer.fit_loop.epoch_loop._results
    module = sys.modules[type(collection).__module__]
    device = trainer.strategy.root_device
    for key, kept in results.items():
        meta = module._Metadata(**kept["meta"], reduce_fx=kept["reduce_fx"])
        meta.sync = module._Sync(
            _should=kept["sync"],
            fn=trainer.strategy.reduce,
            rank_zero_only=kept["rank_zero_only"],
        )
        metric = module._ResultMetric(meta, is_tensor=True)
        metric.value = kept["value"]
        if kept["count"] is not None:
            metric.cumulated_batch_size = kept["count"]
        metric._forward_cache = kept["cache"]
        metric._update_count = kept["updates"]
        metric.has_reset = kept["has_reset"]
        collection[key] = metric.to(device)


def _capture_gradients(trainer: Any) -> dict[str, Any]:
    """Return the gradients that later micro-batches are added to."""
    if not trainer.fit_loop.epoch_loop._should_accumulate():
        return {}
    return {
        name: _plain(parameter.grad)
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


def _plain(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, Tensor) else value
