"""Logged values: the results of the epoch, and the metrics of callbacks and of logical ranks."""

from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from torch import Tensor

from lightning_d9m.engine.state.plain_data import (
    decode_plain,
    encode_plain,
    pack_bytes,
    unpack_bytes,
)
from lightning_d9m.errors import SettingError
from lightning_d9m.integrations.lightning.resume.part import Moment, Part, Phase
from lightning_d9m.integrations.trainer import lightning_private
from lightning_d9m.integrations.trainer.trainer_attributes import (
    Trainer,
    find_metrics,
    get_logical_steps,
)

# The fields of Lightning's `_Metadata` that are plain values: its function and its `_Sync` hold
# functions, and are made again from a name and two flags.
_ARGUMENTS = (
    *("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph"),
    *("add_dataloader_idx", "dataloader_idx", "metric_attribute"),
)


class CallbackMetrics(Part):
    """The metrics for callbacks and schedulers, by name."""

    name, restored = "callback_metrics", ("reset",)

    def capture(self, _phase: Phase) -> dict[str, Tensor]:
        return {name: _copy(own) for name, own in self.trainer.callback_metrics.items()}

    def restore(self, state: dict[str, Tensor], _moment: Moment) -> None:
        device = self.trainer.strategy.root_device
        moved = {name: value.to(device, copy=True) for name, value in state.items()}
        lightning_private.update_callback_metrics(self.trainer, moved)


class Reset(Part):
    """The metrics of the module that Lightning resets right after the save."""

    name, form = "reset", list[str]
    restored, evaluated = ("epoch", "batch"), True

    def capture(self, phase: Phase) -> list[str]:
        return [*list_reset(self.trainer, phase)]

    def restore(self, state: list[str], _moment: Moment) -> None:
        metrics = find_metrics(self.trainer)
        for path in state:
            if (metric := metrics.get(path.removesuffix("."))) is not None:
                metric.reset()


def list_reset(trainer: Trainer, phase: Phase) -> tuple[str, ...]:
    """Return the paths, with a dot, of logged metrics that Lightning resets after this phase.

    They are those of training at the end of an epoch, and those of a finished validation.
    """
    trained, validated, *_ = lightning_private.list_result_collections(trainer)
    ending = [*trained.values()] if phase == "epoch" else []
    ending += validated.values() if phase != "validation" else []
    metrics = [own for own in ending if not own.is_tensor and not own.has_reset]
    # A dict, since a metric that is logged under two names is one object.
    named = dict.fromkeys(own.meta.metric_attribute for own in metrics)
    # With the dot, because callers compare the beginnings of paths: `acc` is not `acc2`.
    return tuple(f"model.{name}." for name in named if name is not None)


class Results(Part):
    """The results that the epoch has logged so far, and how they are reduced over it.

    The state of a logged metric object is in that of the program.
    """

    name, form, restored = "results", list[dict[str, Any]], ("batch",)

    def capture(self, phase: Phase) -> list[dict[str, Any]]:
        results = lightning_private.list_result_collections(self.trainer)[0].items()
        return [] if phase == "epoch" else [*_describe_results(results)]

    def restore(self, state: list[dict[str, Any]], _moment: Moment) -> None:
        trainer = self.trainer
        # First: Lightning drops the results of an epoch when its first batch after the start
        # begins.
        lightning_private.keep_results_at_next_batch(trainer)
        collection = lightning_private.list_result_collections(trainer)[0]
        metrics = dict(trainer.lightning_module.named_modules())
        device = trainer.strategy.root_device
        for saved in state:
            attribute = saved["arguments"]["metric_attribute"]
            if not saved["is_tensor"] and attribute not in metrics:
                continue
            result = lightning_private.create_result(
                trainer,
                {name: saved["arguments"][name] for name in _ARGUMENTS}
                | {"reduce_fx": saved["reduce_fx"]},
                **{name: saved[name] for name in ("is_tensor", "synced", "rank_zero_only")},
            )
            result.value = saved["value"] if saved["is_tensor"] else metrics[attribute]
            if saved["count"] is not None:
                result.cumulated_batch_size = saved["count"]
            cache = saved["cache"]
            cache = None if cache is None else decode_plain(unpack_bytes(cache), device)
            result._update_count, result._forward_cache = saved["updates"], cache  # noqa: SLF001 - of torchmetrics
            result.has_reset = saved["has_reset"]
            collection[saved["key"]] = result.to(device)


def _describe_results(results: Iterable[tuple[str, Any]]) -> Iterable[dict[str, Any]]:
    """Yield the running sums from which the epoch's means are computed."""
    for key, result in results:
        meta, cache = result.meta, None
        if not result.is_tensor and meta.metric_attribute is None:
            continue
        # A metric of the program may return an object, which has no plain form.
        with suppress(SettingError):
            cache = pack_bytes(encode_plain(result._forward_cache))  # noqa: SLF001 - of torchmetrics
        # Lightning makes this attribute only for a mean.
        count = getattr(result, "cumulated_batch_size", None) if result.is_tensor else None
        yield {
            "key": key,
            "arguments": {name: getattr(meta, name) for name in _ARGUMENTS},
            # Lightning reduces by four functions of torch only, and takes them by their names.
            "reduce_fx": meta.reduce_fx.__name__,
            "synced": meta.sync.should,
            "rank_zero_only": meta.sync.rank_zero_only,
            "is_tensor": result.is_tensor,
            "value": _copy(result.value) if result.is_tensor else None,
            "count": None if count is None else _copy(count),  # of samples, for an average
            "updates": result._update_count,  # noqa: SLF001 - of torchmetrics
            "cache": cache,  # the value for the last batch, if it is plain
            "has_reset": result.has_reset,
        }


def count_logged(trainer: Trainer) -> dict[str, int]:
    """Return how often each value of the training epoch was logged."""
    results = lightning_private.list_result_collections(trainer)[0].values()
    return {
        f"the logged value {own.meta.name!r} of {own.meta.fx}": own._update_count  # noqa: SLF001 - of torchmetrics
        for own in results
        if own.is_tensor and own.meta.on_epoch
    }


class LogicalRanks(Part):
    """The encoded states of metrics by path and logical rank, and the sums that ranks have logged.

    For these see ``LoggedValues``.
    """

    name, restored, evaluated = "logical", ("epoch", "batch"), True

    def capture(self, phase: Phase) -> dict[str, Any]:
        if (logical := get_logical_steps(self.trainer)) is None:
            return {"metrics": {}, "logged": []}
        skipped = list_reset(self.trainer, phase)
        metrics = logical.metrics.capture()
        kept = {path: own for path, own in metrics.items() if not f"{path}.".startswith(skipped)}
        return {"metrics": kept, "logged": [logical.logged.capture()]}

    def restore(self, state: dict[str, Any], moment: Moment) -> None:
        if (logical := get_logical_steps(self.trainer)) is not None:
            logical.metrics.restore(state["metrics"])
            if moment == "batch":
                logical.logged.restore(state["logged"])

    def select(self, states: list[Any], _rank: int) -> Any:
        metrics: dict[str, dict[int, Any]] = {}
        for name, by_rank in (entry for state in states for entry in state["metrics"].items()):
            # Each process had some logical ranks; the next run may divide them among other
            # processes.
            metrics.setdefault(name, {}).update(by_rank)
        return {"metrics": metrics, "logged": [own for state in states for own in state["logged"]]}


def _copy(value: Tensor) -> Tensor:
    # Copied: `AsyncCheckpointIO` writes while the training adds to the value.
    return value.detach().to("cpu", copy=True)
