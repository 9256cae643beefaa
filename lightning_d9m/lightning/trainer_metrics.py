"""The metrics of a run, and the names of its callbacks."""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from torch import nn
from torchmetrics import Metric, MetricCollection

from lightning_d9m.lightning.trainer_attributes import list_callbacks

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


def find_metrics(trainer: "Trainer") -> dict[str, Any]:
    """Return the metrics and collections of the module and of its callbacks, by path."""
    of_model = find_metric_modules(dict(trainer.lightning_module.named_modules()))
    found = {f"model.{name}" if name else "model": metric for name, metric in of_model.items()}
    for path, owner in _list_owned_modules(trainer):
        metrics = find_metric_modules(dict(owner.named_modules()))
        found |= {f"{path}.{name}" if name else path: metric for name, metric in metrics.items()}
    return found


def _list_owned_modules(trainer: "Trainer") -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that are attributes of callbacks, by path."""
    for path, callback in name_callbacks(list_callbacks(trainer)).items():
        for name, value in getattr(callback, "__dict__", {}).items():
            if isinstance(value, nn.Module) and value is not trainer.lightning_module:
                yield f"{path}.{name}", value


def name_callbacks(callbacks: Iterable[object]) -> dict[str, Any]:
    """Return the callbacks by names that do not depend on other callbacks."""
    named: dict[str, Any] = {}
    counts: Counter[str] = Counter()
    for callback in callbacks:
        base = f"callbacks.{type(callback).__name__}"
        named[f"{base}#{counts[base]}" if counts[base] else base] = callback
        counts[base] += 1
    return named


def find_metric_modules(modules: dict[str, nn.Module]) -> dict[str, Any]:
    """Return the metrics and collections of metrics among modules."""
    # Each base, instead of isinstance: that asks all subclasses of Metric, which is abstract.
    kinds = {Metric, MetricCollection}
    of_metrics = {kind for kind in set(map(type, modules.values())) if kinds & {*kind.__mro__}}
    return {name: module for name, module in modules.items() if type(module) in of_metrics}
