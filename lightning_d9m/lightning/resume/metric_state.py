"""The metrics of a run, and plain values for checkpoints."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torchmetrics import Metric, MetricCollection

from lightning_d9m.lightning.trainer_attributes import list_callbacks

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

_SCALARS = (bool, int, float, str)


class NotPlainError(TypeError):
    """A value that a checkpoint cannot hold without pickled objects."""


def to_plain(value: Any) -> Any:
    """Return a copy on the CPU of tensors, numbers, strings and containers of these.

    Raises:
        NotPlainError: For anything else.
    """
    if value is None or isinstance(value, _SCALARS):
        return value
    if isinstance(value, Tensor):
        return value.detach().cpu().clone()
    if type(value) is list or type(value) is tuple:
        return type(value)(to_plain(part) for part in value)
    if isinstance(value, Mapping):
        return {to_plain(key): to_plain(part) for key, part in value.items()}
    raise NotPlainError(f"{type(value).__name__} is not a plain value")


def move(value: Any, device: torch.device) -> Any:
    """Return a copy of plain values whose tensors are on a device."""
    return tree_map_only(
        Tensor, lambda tensor: torch.empty_like(tensor, device=device).copy_(tensor), value
    )


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
