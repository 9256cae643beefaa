# ruff: noqa: SLF001 - Lightning has no public access to the results that were logged so far
"""The results that a run has logged so far: running sums, and the metrics for callbacks."""

import sys
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lightning_d9m.lightning.resume.loop_position import LoopPhase
from lightning_d9m.lightning.resume.metric_state import NotPlainError, move, to_plain

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


def capture_latest(trainer: Any) -> dict[str, Any]:
    """Return the metrics for callbacks, including those of an earlier validation."""
    return {
        name: to_plain(value)
        for name, value in trainer.callback_metrics.items()
        if isinstance(value, Tensor)
    }


def restore_latest(trainer: Any, latest: Mapping[str, Any]) -> None:
    """Restore the metrics for callbacks and schedulers."""
    moved = move(dict(latest), trainer.strategy.root_device)
    trainer._logger_connector._callback_metrics.update(moved)


def find_metrics_to_reset(trainer: Any, moment: LoopPhase) -> list[str]:
    """Return the names of logged metrics that Lightning resets after the hooks of this phase.

    These are the metrics of training at the end of an epoch, and of a finished validation.
    """
    loop = trainer.fit_loop.epoch_loop
    ending = list(loop._results.values()) if moment == "epoch" else []
    ending += loop.val_loop._results.values() if moment != "validation" else []
    names = [
        metric.meta.metric_attribute
        for metric in ending
        if not metric.is_tensor and not metric.has_reset
    ]
    return [name for name in dict.fromkeys(names) if name is not None]


def capture_results(trainer: Any) -> dict[str, Any]:
    """Return the running sums from which the epoch's means are computed.

    The state of a logged metric object is in ``metric_state``.
    """
    found = {}
    for key, metric in trainer.fit_loop.epoch_loop._results.items():
        meta = metric.meta
        kept = {
            "meta": {name: getattr(meta, name) for name in _META},
            "reduce_fx": meta.reduce_fx.__name__,
            "sync": meta.sync.should,
            "rank_zero_only": meta.sync.rank_zero_only,
            "updates": metric._update_count,
            "has_reset": metric.has_reset,
        }
        try:
            kept["cache"] = to_plain(metric._forward_cache)
        except NotPlainError:
            kept["cache"] = None
        if metric.is_tensor:
            kept["value"] = to_plain(metric.value)
            kept["count"] = to_plain(getattr(metric, "cumulated_batch_size", None))
        elif meta.metric_attribute is None:
            continue
        found[key] = kept
    return found


def restore_results(trainer: Any, results: Mapping[str, Any]) -> None:
    """Restore the results of the epoch. Called once, before its next batch."""
    # Otherwise the first batch resets the restored results.
    trainer._logger_connector._first_loop_iter = False
    collection = trainer.fit_loop.epoch_loop._results
    module = sys.modules[type(collection).__module__]
    metrics = dict(trainer.lightning_module.named_modules())
    device = trainer.strategy.root_device
    for key, kept in results.items():
        meta = module._Metadata(**kept["meta"], reduce_fx=kept["reduce_fx"])
        meta.sync = module._Sync(
            _should=kept["sync"],
            fn=trainer.strategy.reduce,
            rank_zero_only=kept["rank_zero_only"],
        )
        is_tensor = "value" in kept
        if not is_tensor and meta.metric_attribute not in metrics:
            continue
        metric = module._ResultMetric(meta, is_tensor=is_tensor)
        metric.value = kept["value"] if is_tensor else metrics[meta.metric_attribute]
        if kept.get("count") is not None:
            metric.cumulated_batch_size = kept["count"]
        metric._forward_cache = kept["cache"]
        metric._update_count = kept["updates"]
        metric.has_reset = kept["has_reset"]
        collection[key] = metric.to(device)
