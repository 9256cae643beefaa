"""States of torchmetrics metrics by logical rank."""

from collections.abc import Callable
from copy import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric, MetricCollection

from lightning_d9m.attribute_patches import AttributePatches, Replacement
from lightning_d9m.engine.state.plain_data import (
    decode_plain,
    encode_plain,
    pack_bytes,
    unpack_bytes,
)
from lightning_d9m.errors import SettingError

# torchmetrics keeps it beside the states: `compute` warns, and some reductions divide, by it.
_COUNT = "_update_count"
# The attribute of a metric that has its states by logical rank between two runs of a Trainer.
_KEPT = "_d9m_states"


class MetricStates:
    """Keeps a state of each metric for each logical rank, and reduces all of them at once.

    Float sums then add in an order that the number of processes does not decide.

    ``found`` has the metrics and collections by path. ``current`` returns the logical rank whose
    micro-batch is computed now, or None, and ``gather`` the bytes of every process.
    """

    def __init__(
        self,
        found: dict[str, Any],
        block: range,
        current: Callable[[], int | None],
        gather: Callable[[bytes], list[bytes]],
    ) -> None:
        self._found = found
        self._metrics = [
            metric
            for metric in dict.fromkeys(self._found.values())
            if not isinstance(metric, MetricCollection)
        ]
        self._block = block
        self._current = current
        self._gather = gather
        self._states: dict[tuple[int, int], dict[str, Any]] = {}
        self._patches = AttributePatches()
        self._updated: int | None = None

    def attach(self, patches: AttributePatches) -> None:
        """Let the metrics reset and synchronize the states of all logical ranks."""
        self._patches = patches
        for metric in self._metrics:
            self._attach(metric)
        for collection in self._found.values():
            if isinstance(collection, MetricCollection):
                # Metrics of a group share the state of the first, and here each has several.
                for name, value in (
                    ("_enable_compute_groups", False),
                    ("_groups_checked", False),
                    ("_groups", {}),
                ):
                    patches.replace(collection, name, value)

    def close(self) -> None:
        """Keep the states with the metrics, for the next run."""
        for metric in self._metrics:
            states = {rank: self._get(metric, rank) for rank in self._block}
            # By `vars`, because a metric is a module whose `__setattr__` looks at every value.
            vars(metric)[_KEPT] = (_read(metric), states)
            call = partial(self._compute_kept, metric, metric.compute)
            vars(metric)["compute"] = Replacement(metric.compute, call)

    def _compute_kept(
        self, metric: Any, compute: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Compute after the run: of all logical ranks, until the program updates the metric."""
        live, syncs = _read(metric), metric._to_sync  # noqa: SLF001 - of torchmetrics
        before = vars(metric).get(_KEPT, ({}, {}))[0]
        # It is called on all processes, as torchmetrics needs it in DDP, or has the result already.
        if metric._computed is not None or not syncs or _differs(live, before):  # noqa: SLF001
            return compute(*args, **kwargs)
        try:
            self._synchronize(metric)
            metric._to_sync = False  # noqa: SLF001
            return compute(*args, **kwargs)
        finally:
            for name, value in {**live, "_to_sync": syncs}.items():
                setattr(metric, name, value)

    def _get(self, metric: Any, rank: int) -> dict[str, Any]:
        return self._states.get((id(metric), rank)) or _make_default(metric)

    def _attach(self, metric: Any) -> None:
        # It continues from the states of the last run, or from that which it has now.
        live = _read(metric)
        before, states = vars(metric).pop(_KEPT, ({}, {}))
        # The program has reset or updated the metric between the runs, so what was kept is stale.
        if _differs(live, before):
            states = {}
        if isinstance(metric.compute, Replacement):
            metric.compute = metric.compute.replaced
        for rank in self._block if live[_COUNT] else ():
            self._states[id(metric), rank] = states.get(rank) or {
                name: value.clone() if isinstance(value, Tensor) else copy(value)
                for name, value in live.items()
            }
        for name, call in (
            ("reset", partial(self._reset, metric, metric.reset)),
            ("_sync_dist", partial(self._synchronize, metric)),
            # torchmetrics looks for a process group, which a single process lacks: it would never
            # ask for the states of its other logical ranks.
            ("distributed_available_fn", lambda: True),
            ("update", partial(self._update, metric, metric.update)),
            ("forward", partial(self._update, metric, metric.forward)),
        ):
            self._patches.replace(metric, name, Replacement(getattr(metric, name), call))

    def add(self, path: str, value: Any) -> bool:
        """Add a metric that is in a container of the module; return whether it is a metric."""
        is_metric = isinstance(value, Metric)
        if is_metric and all(value is not known for known in self._metrics):  # == gives a metric
            self._found[f"model.{path}"] = value
            self._metrics.append(value)
            self._attach(value)
        return is_metric

    def _update(self, metric: Any, update: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Update a metric; between steps that of each logical rank, as each process of DDP does."""
        if self._active() is not None:
            return update(*args, **kwargs)
        result = None
        for rank in self._block:
            self._updated = rank
            try:
                # The metric itself is left in the state of the last rank; `compute` synchronizes
                # all of them.
                self.enter(rank, [metric])
                result = update(*args, **kwargs)
                self.leave(rank, [metric])
            finally:
                self._updated = None
        return result

    def _active(self) -> int | None:
        """Return the logical rank of the step that runs now, or whose metric is updated."""
        rank = self._current()
        return self._updated if rank is None else rank

    def enter(self, logical_rank: int, metrics: list[Any] | None = None) -> None:
        """Set metrics, by default all, to the states of a logical rank."""
        for metric in self._metrics if metrics is None else metrics:
            for name, value in self._get(metric, logical_rank).items():
                setattr(metric, name, value)
            # `compute` would return what it has kept of another logical rank.
            metric._computed = None  # noqa: SLF001 - of torchmetrics, which has no setter

    def leave(self, logical_rank: int, metrics: list[Any] | None = None) -> None:
        """Keep the states of metrics of a logical rank."""
        for metric in self._metrics if metrics is None else metrics:
            self._states[id(metric), logical_rank] = _read(metric)

    def capture(self) -> dict[str, dict[int, Any]]:
        """Return the encoded states by path and logical rank."""
        return {
            path: {
                rank: pack_bytes(encode_plain(self._states[id(metric), rank]))
                for rank in self._block
                if (id(metric), rank) in self._states
            }
            for path, metric in self._found.items()
        }

    def restore(self, states: dict[str, dict[int, Any]]) -> None:
        """Restore the states of the logical ranks of this process."""
        for path, by_rank in states.items():
            metric = self._found.get(path)
            for rank in self._block:
                if metric is not None and rank in by_rank:
                    state = decode_plain(unpack_bytes(by_rank[rank]), metric.device)
                    names = _make_default(metric).keys()  # no other attribute is set
                    self._states[id(metric), rank] = {name: state[name] for name in names}

    def _reset(self, metric: Any, reset: Callable[[], None]) -> None:
        if self._active() is None:
            for rank in self._block:
                self._states.pop((id(metric), rank), None)
            for name, value in _make_default(metric).items():
                setattr(metric, name, value)
        reset()

    def _synchronize(self, metric: Any, *_: Any, **__: Any) -> None:
        """Set the state to that of all logical ranks, as torchmetrics does for processes."""
        rank = self._current()
        if rank is not None:
            raise SettingError(
                f"The metric {type(metric).__name__} is computed over all processes in the step of "
                f"logical rank {rank}, and the logical ranks of a process run one after the other: "
                "log the metric object itself, or compute it in a hook at the end of the epoch."
            )
        own_states = {rank: self._get(metric, rank) for rank in self._block}
        by_rank: dict[int, dict[str, Any]] = {}
        for part in self._gather(encode_plain(own_states)):
            by_rank |= decode_plain(part, metric.device)
        # In the order of ranks, so that a float sum has one order of additions on any number of
        # processes.
        states = [by_rank[rank] for rank in sorted(by_rank)]
        for name, reduction in metric._reductions.items():  # noqa: SLF001 - of torchmetrics
            setattr(metric, name, _reduce([state[name] for state in states], reduction))


def _read(metric: Any) -> dict[str, Any]:
    names = [*metric._defaults, _COUNT]  # noqa: SLF001 - of torchmetrics
    return {name: getattr(metric, name) for name in names}


def _differs(live: dict[str, Any], before: dict[str, Any]) -> bool:
    """Return whether the program has reset or updated a metric; an update counts."""
    return any(live[name] is not before.get(name) for name in live)


def _make_default(metric: Any) -> dict[str, Any]:
    defaults = metric._defaults  # noqa: SLF001 - of torchmetrics
    state: dict[str, Any] = {
        name: value.detach().clone().to(metric.device) if isinstance(value, Tensor) else []
        for name, value in defaults.items()
    }
    return {**state, _COUNT: 0}


def _reduce(values: list[Any], reduction: Callable[..., Any] | None) -> Any:
    if isinstance(values[0], Tensor):
        gathered: Any = torch.stack(values)
    else:
        gathered = [part for value in values for part in value]
        if not gathered:
            return []
    return gathered if reduction is None else reduction(gathered)
