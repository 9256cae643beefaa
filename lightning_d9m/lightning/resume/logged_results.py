"""The results that a run has logged so far: running sums, and the metrics for callbacks."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lightning_d9m.lightning import lightning_private
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
    lightning_private.update_callback_metrics(trainer, moved)


def find_metrics_to_reset(trainer: Any, moment: LoopPhase) -> list[str]:
    """Return the names of logged metrics that Lightning resets after the hooks of this phase.

    These are the metrics of training at the end of an epoch, and of a finished validation.
    """
    loop = trainer.fit_loop.epoch_loop
    ending: list[Any] = []
    if moment == "epoch":
        ending += lightning_private.get_logged_results(loop).values()
    if moment != "validation":
        ending += lightning_private.get_logged_results(loop.val_loop).values()
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
    for key, metric in lightning_private.get_logged_results(trainer.fit_loop.epoch_loop).items():
        meta = metric.meta
        updates, cache = lightning_private.get_update_state(metric)
        kept = {
            "meta": {name: getattr(meta, name) for name in _META},
            "reduce_fx": meta.reduce_fx.__name__,
            "sync": meta.sync.should,
            "rank_zero_only": meta.sync.rank_zero_only,
            "updates": updates,
            "has_reset": metric.has_reset,
        }
        try:
            kept["cache"] = to_plain(cache)
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
    lightning_private.keep_results_at_next_batch(trainer)
    collection = lightning_private.get_logged_results(trainer.fit_loop.epoch_loop)
    metrics = dict(trainer.lightning_module.named_modules())
    device = trainer.strategy.root_device
    for key, kept in results.items():
        is_tensor = "value" in kept
        attribute = kept["meta"]["metric_attribute"]
        if not is_tensor and attribute not in metrics:
            continue
        metric = lightning_private.create_result(
            trainer,
            kept["meta"] | {"reduce_fx": kept["reduce_fx"]},
            is_tensor=is_tensor,
            synced=kept["sync"],
            rank_zero_only=kept["rank_zero_only"],
        )
        metric.value = kept["value"] if is_tensor else metrics[attribute]
        if kept.get("count") is not None:
            metric.cumulated_batch_size = kept["count"]
        lightning_private.set_update_state(metric, kept["updates"], kept["cache"])
        metric.has_reset = kept["has_reset"]
        collection[key] = metric.to(device)
