"""The states of torchmetrics metrics as plain values, which Lightning does not save.

Metrics in the module and in its callbacks are found at any depth. Saves each metric's declared
states (``add_state``), its other tensors, and its private numbers, such as the number of updates.
Constructor arguments are not saved.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torchmetrics import MetricCollection

from lightning_d9m.control.object_walk import MODULE_ATTRIBUTES
from lightning_d9m.lightning.resume.model_parts import ModelParts, find_metric_modules
from lightning_d9m.lightning.saved_state import SavedMetrics
from lightning_d9m.lightning.trainer_attributes import list_callbacks

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

LIMIT = 16 * 2**20
"""Most bytes of metric states that a rank saves; a metric beyond it is left out and reported."""

_NUMBERS = (bool, int, float)
_SCALARS = (*_NUMBERS, str)
_SEQUENCES = (list, tuple)
# Attributes that are saved whatever they are.
_RESULTS = frozenset({"_computed", "_forward_cache"})
# The types of most attributes of a metric, of which no other is saved.
_UNSAVED = frozenset({type(None), str, dict, OrderedDict, list, FunctionType, MethodType})
# Which metrics of a collection share their states.
_OF_COLLECTION = ("_groups", "_groups_checked", "_state_is_copy")


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


def capture_metrics(
    trainer: "Trainer", model: ModelParts, reset: list[str]
) -> tuple[SavedMetrics, dict[str, str]]:
    """Return the state of every metric.

    ``reset`` has the names of the module's metrics that Lightning is about to reset.

    Returns:
        The states; and the reason why a metric was left out, by path, as the end of a sentence.
    """
    found = _find_metrics(trainer, model.metrics)
    known = [found[path] for name in reset if (path := f"model.{name}") in found]
    reset_parts = {id(part) for metric in known for part in metric.modules()}
    saved = SavedMetrics(paths=list(found), reset=reset)
    left_out: dict[str, str] = {}
    free = LIMIT
    for path, metric in found.items():
        if id(metric) in reset_parts:
            continue
        try:
            states = _capture(metric)
        except NotPlainError as error:
            left_out[path] = f"of which a part cannot be saved: {error}"
            continue
        size = _count_bytes(states)
        if size > free:
            left_out[path] = f"of {size} bytes, where {LIMIT} are kept for all metrics"
        else:
            free -= size
            saved.states[path] = states
    return saved, left_out


def restore_metrics(trainer: "Trainer", saved: SavedMetrics) -> None:
    """Restore the state of every metric that exists."""
    found = find_metrics(trainer)
    for path, states in saved.states.items():
        if path not in found:
            continue
        metric = found[path]
        on_cpu = getattr(metric, "compute_on_cpu", False)
        device = getattr(metric, "device", torch.device("cpu"))
        for name, value in states.items():
            stays = on_cpu and isinstance(value, list)
            vars(metric)[name] = move(value, torch.device("cpu") if stays else device)
    for name in saved.reset:
        if (metric := found.get(f"model.{name}")) is not None:
            metric.reset()


def find_metrics(trainer: "Trainer") -> dict[str, Any]:
    """Return the metrics and collections of the module and of its callbacks, by path."""
    return _find_metrics(
        trainer, find_metric_modules(dict(trainer.lightning_module.named_modules()))
    )


def _find_metrics(trainer: "Trainer", of_model: Mapping[str, Any]) -> dict[str, Any]:
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


def _capture(metric: Any) -> dict[str, Any]:
    if isinstance(metric, MetricCollection):
        return {name: to_plain(getattr(metric, name)) for name in _OF_COLLECTION}
    states = {name: to_plain(getattr(metric, name)) for name in metric._defaults}  # noqa: SLF001 - of torchmetrics
    for name, value in vars(metric).items():
        if type(value) in _UNSAVED and name not in _RESULTS:
            continue
        if name in MODULE_ATTRIBUTES or name in states:
            continue
        number = name.startswith("_") and isinstance(value, _NUMBERS)
        if number or isinstance(value, Tensor) or name in _RESULTS:
            states[name] = to_plain(value)
    return states


def _count_bytes(plain: Any) -> int:
    if isinstance(plain, Tensor):
        return plain.nbytes
    if isinstance(plain, dict):
        plain = plain.values()
    elif not isinstance(plain, _SEQUENCES):
        return len(plain) if isinstance(plain, str) else 0
    return sum(map(_count_bytes, plain))
