"""The results that a run has logged so far: running sums, and the metrics for callbacks."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lightning_d9m.errors import SettingError
from lightning_d9m.lightning import lightning_private
from lightning_d9m.lightning.saved_state import LoopPhase, SavedResult
from lightning_d9m.state.plain_data import decode_plain, encode_plain, pack_bytes, unpack_bytes

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

_ARGUMENTS = (
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


def capture_latest(trainer: "Trainer") -> dict[str, Any]:
    """Return the metrics for callbacks, including those of an earlier validation."""
    return {name: _copy(value) for name, value in trainer.callback_metrics.items()}


def restore_latest(trainer: "Trainer", latest: Mapping[str, Any]) -> None:
    """Restore the metrics for callbacks and schedulers."""
    device = trainer.strategy.root_device
    moved = {name: value.to(device, copy=True) for name, value in latest.items()}
    lightning_private.update_callback_metrics(trainer, moved)


def _copy(value: Tensor) -> Tensor:
    return value.detach().to("cpu", copy=True)


def find_metrics_to_reset(trainer: "Trainer", phase: LoopPhase) -> list[str]:
    """Return the names of logged metrics that Lightning resets after the hooks of this phase.

    These are the metrics of training at the end of an epoch, and of a finished validation.
    """
    loop = trainer.fit_loop.epoch_loop
    ending: list[Any] = []
    if phase == "epoch":
        ending += lightning_private.get_logged_results(loop).values()
    if phase != "validation":
        ending += lightning_private.get_logged_results(loop.val_loop).values()
    names = [
        metric.meta.metric_attribute
        for metric in ending
        if not metric.is_tensor and not metric.has_reset
    ]
    return [name for name in dict.fromkeys(names) if name is not None]


def capture_results(trainer: "Trainer") -> list[SavedResult]:
    """Return the running sums from which the epoch's means are computed.

    The state of a logged metric object is in ``metric_state``.
    """
    return [
        _capture_result(key, result)
        for key, result in lightning_private.get_logged_results(trainer.fit_loop.epoch_loop).items()
        if result.is_tensor or result.meta.metric_attribute is not None
    ]


def _capture_result(key: str, result: Any) -> SavedResult:
    meta = result.meta
    updates, value = lightning_private.get_update_state(result)
    cache = None
    with suppress(SettingError):
        cache = pack_bytes(encode_plain(value))
    count = getattr(result, "cumulated_batch_size", None) if result.is_tensor else None
    return SavedResult(
        key=key,
        arguments={name: getattr(meta, name) for name in _ARGUMENTS},
        reduce_fx=meta.reduce_fx.__name__,
        synced=meta.sync.should,
        rank_zero_only=meta.sync.rank_zero_only,
        is_tensor=result.is_tensor,
        value=_copy(result.value) if result.is_tensor else None,
        count=None if count is None else _copy(count),
        updates=updates,
        cache=cache,
        has_reset=result.has_reset,
    )


def restore_results(trainer: "Trainer", results: Sequence[SavedResult]) -> None:
    """Restore the results of the epoch. Called once, before its next batch."""
    lightning_private.keep_results_at_next_batch(trainer)
    collection = lightning_private.get_logged_results(trainer.fit_loop.epoch_loop)
    metrics = dict(trainer.lightning_module.named_modules())
    device = trainer.strategy.root_device
    for saved in results:
        attribute = saved.arguments["metric_attribute"]
        if not saved.is_tensor and attribute not in metrics:
            continue
        result = lightning_private.create_result(
            trainer,
            saved.arguments | {"reduce_fx": saved.reduce_fx},
            is_tensor=saved.is_tensor,
            synced=saved.synced,
            rank_zero_only=saved.rank_zero_only,
        )
        result.value = saved.value if saved.is_tensor else metrics[attribute]
        if saved.count is not None:
            result.cumulated_batch_size = saved.count
        cache = None if saved.cache is None else decode_plain(unpack_bytes(saved.cache), device)
        lightning_private.set_update_state(result, saved.updates, cache)
        result.has_reset = saved.has_reset
        collection[saved.key] = result.to(device)
