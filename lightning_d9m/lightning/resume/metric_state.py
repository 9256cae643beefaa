"""The states of torchmetrics metrics as plain values, which Lightning does not save.

Metrics in the module and in its callbacks are found at any depth. Saves each metric's declared
states (``add_state``), its other tensors, and its private numbers, such as the number of updates.
Constructor arguments are not saved.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from lightning_d9m.hashing.nested_values import list_leaves

LIMIT = 16 * 2**20
"""Most bytes of metric states that a rank saves; a metric beyond it is left out and reported."""

_MODULE = frozenset(vars(nn.Module()))
# Which metrics of a collection share their states.
_OF_COLLECTION = ("_groups", "_groups_checked", "_state_is_copy")


class NotPlainError(TypeError):
    """A value that a checkpoint cannot hold without pickled objects."""


def to_plain(value: Any) -> Any:
    """Return a copy on the CPU of tensors, numbers, strings and containers of these.

    Raises:
        NotPlainError: For anything else.
    """
    if isinstance(value, Tensor):
        return value.detach().cpu().clone()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if type(value) is list or type(value) is tuple:
        return type(value)(to_plain(part) for part in value)
    if isinstance(value, Mapping):
        return {to_plain(key): to_plain(part) for key, part in value.items()}
    raise NotPlainError(f"{type(value).__name__} is not a plain value")


def move(value: Any, device: torch.device) -> Any:
    """Return a copy of plain values whose tensors are on a device."""
    if isinstance(value, Tensor):
        return torch.empty_like(value, device=device).copy_(value)
    if isinstance(value, list | tuple):
        return type(value)(move(part, device) for part in value)
    if isinstance(value, dict):
        return {key: move(part, device) for key, part in value.items()}
    return value


@dataclass
class MetricState:
    """The saved states of metrics.

    Attributes:
        paths: The path of every metric.
        states: The attributes of each metric, by its path and their name.
        reset: The metrics of the module that Lightning resets right after the save.
        left_out: The reason why a metric was left out, by path, as the end of a sentence.
    """

    paths: list[str] = field(default_factory=list)
    states: dict[str, dict[str, Any]] = field(default_factory=dict)
    reset: list[str] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)

    def as_plain(self) -> dict[str, Any]:
        """Return the stored form."""
        return {"paths": self.paths, "states": self.states, "reset": self.reset}


def capture_metrics(trainer: Any, reset: list[str]) -> MetricState:
    """Return the state of every metric.

    Args:
        trainer: The Trainer.
        reset: Names of the module's metrics that Lightning is about to reset.
    """
    found = find_metrics(trainer)
    known = [found[path] for name in reset if (path := f"model.{name}") in found]
    reset_parts = {id(part) for metric in known for part in metric.modules()}
    measured = MetricState(paths=list(found), reset=reset)
    room = LIMIT
    for path, metric in found.items():
        if id(metric) in reset_parts:
            continue
        try:
            states = _capture(metric)
        except NotPlainError as error:
            measured.left_out[path] = f"of which a part cannot be saved: {error}"
            continue
        size = _count_bytes(states)
        if size > room:
            measured.left_out[path] = f"of {size} bytes, where {LIMIT} are kept for all metrics"
        else:
            room -= size
            measured.states[path] = states
    return measured


def restore_metrics(trainer: Any, measured: MetricState) -> None:
    """Restore the state of every metric that exists."""
    found = find_metrics(trainer)
    for path, states in measured.states.items():
        if path not in found:
            continue
        metric = found[path]
        on_cpu = getattr(metric, "compute_on_cpu", False)
        device = getattr(metric, "device", torch.device("cpu"))
        for name, value in states.items():
            stays = on_cpu and isinstance(value, list)
            vars(metric)[name] = move(value, torch.device("cpu") if stays else device)
    for name in measured.reset:
        if (metric := found.get(f"model.{name}")) is not None:
            metric.reset()


def find_metrics(trainer: Any) -> dict[str, Any]:
    """Return the metrics and collections of the module and of its callbacks, by path."""
    found: dict[str, Any] = {}
    for path, owner in _owners(trainer):
        for name, module in owner.named_modules():
            if isinstance(module, Metric | MetricCollection):
                found[f"{path}.{name}" if name else path] = module
    return found


def _owners(trainer: Any) -> Iterator[tuple[str, nn.Module]]:
    yield "model", trainer.lightning_module
    for path, callback in name_callbacks(trainer.callbacks).items():
        for name, value in getattr(callback, "__dict__", {}).items():
            if isinstance(value, nn.Module) and value is not trainer.lightning_module:
                yield f"{path}.{name}", value


def name_callbacks(callbacks: list[Any]) -> dict[str, Any]:
    """Return callbacks by names that do not depend on other callbacks."""
    named: dict[str, Any] = {}
    for callback in callbacks:
        base = f"callbacks.{type(callback).__name__}"
        count = sum(name.partition("#")[0] == base for name in named)
        named[f"{base}#{count}" if count else base] = callback
    return named


def _capture(metric: Any) -> dict[str, Any]:
    if isinstance(metric, MetricCollection):
        return {name: to_plain(getattr(metric, name)) for name in _OF_COLLECTION}
    states = {name: to_plain(getattr(metric, name)) for name in metric._defaults}  # noqa: SLF001 - of torchmetrics
    for name, value in vars(metric).items():
        if name in _MODULE or name in states:
            continue
        number = name.startswith("_") and isinstance(value, bool | int | float)
        if number or isinstance(value, Tensor) or name in ("_computed", "_forward_cache"):
            states[name] = to_plain(value)
    return states


def _count_bytes(value: Any) -> int:
    leaves = [leaf for _, leaf in list_leaves(value)]
    tensors = sum(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor))
    return tensors + sum(len(leaf) for leaf in leaves if isinstance(leaf, str))
