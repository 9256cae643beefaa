"""States of torchmetrics metrics by logical rank."""

import operator
from collections.abc import Callable
from copy import copy, deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric, MetricCollection
from torchmetrics.utilities import dim_zero_sum

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


class MetricStates:
    """Keeps a state of each metric for each logical rank, and reduces all of them at once.

    Float sums then add in an order that the number of processes does not decide.

    ``found`` has the metrics and collections by path. ``processes`` have the logical ranks: the
    strategy. ``current`` returns the logical rank whose micro-batch is computed now, or None.
    """

    def __init__(
        self, found: dict[str, Any], processes: Any, current: Callable[[], int | None]
    ) -> None:
        self._found = found
        self._metrics = [
            metric
            for metric in dict.fromkeys(self._found.values())
            if not isinstance(metric, MetricCollection)
        ]
        self._block: range = processes.block
        self._ranks: int = processes.blocks.logical_ranks
        self._gather: Callable[[bytes], list[bytes]] = processes.gather_bytes
        self._current = current
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

    def close(self, *, alone: bool) -> None:
        """Leave the state of all logical ranks in each metric, on every process.

        After an error ``alone`` leaves out what other processes have, as they may not be here.
        """
        data = encode_plain(self.capture())
        parts = [decode_plain(part) for part in ([data] if alone else self._gather(data))]
        for path, metric in self._found.items():
            found = {rank: own for part in parts for rank, own in part.get(path, {}).items()}
            if not found:
                continue
            states = [_decode(metric, found[rank]) for rank in sorted(found)]
            _join(metric, states, keeps_lists=True)
            setattr(metric, _COUNT, count := sum(state[_COUNT] for state in states))
            available = metric.distributed_available_fn
            otherwise = available.otherwise if isinstance(available, _Whole) else available
            metric.distributed_available_fn = _Whole(metric, count, otherwise)

    def _get(self, metric: Any, rank: int) -> dict[str, Any]:
        return self._states.get((id(metric), rank)) or _make_default(metric)

    def _attach(self, metric: Any) -> None:
        live = _read(metric)
        for rank in self._block if live[_COUNT] else ():
            self._states[id(metric), rank] = _divide(metric, live, rank, self._ranks)
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
                # All metrics, since one that wraps others updates these. They are left in the state
                # of the last rank; `compute` synchronizes all of them.
                self._set(rank)
                result = update(*args, **kwargs)
                self.leave(rank)
            finally:
                self._updated = None
        return result

    def _active(self) -> int | None:
        """Return the logical rank of the step that runs now, or whose metric is updated."""
        rank = self._current()
        return self._updated if rank is None else rank

    def enter(self, logical_rank: int) -> None:
        """Set all metrics to the states of a logical rank."""
        self._set(logical_rank)
        for metric in self._metrics:
            # `compute` would return what it has kept of another logical rank.
            metric._computed = None  # noqa: SLF001 - of torchmetrics, which has no setter

    def _set(self, logical_rank: int) -> None:
        for metric in self._metrics:
            for name, value in self._get(metric, logical_rank).items():
                setattr(metric, name, value)

    def leave(self, logical_rank: int) -> None:
        """Keep the states of all metrics of a logical rank."""
        for metric in self._metrics:
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
                    self._states[id(metric), rank] = _decode(metric, by_rank[rank])

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
        _join(metric, [by_rank[rank] for rank in sorted(by_rank)])


class _Whole:
    """Tells torchmetrics that a metric has the state of all processes, until it is reset.

    A copy of the metric has it, too; a file of it has what torchmetrics calls otherwise.
    """

    def __init__(self, metric: Any, count: int, otherwise: Callable[[], bool]) -> None:
        self.otherwise = otherwise
        self._metric, self._count = metric, count

    def __call__(self) -> bool:
        """Return whether the states of other processes are needed."""
        return getattr(self._metric, _COUNT) < self._count and bool(self.otherwise())

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Whole":
        return _Whole(deepcopy(self._metric, memo), self._count, self.otherwise)

    def __reduce__(self) -> tuple[Any, ...]:
        return operator.itemgetter(0), ((self.otherwise,),)


def _read(metric: Any) -> dict[str, Any]:
    names = [*metric._defaults, _COUNT]  # noqa: SLF001 - of torchmetrics
    return {name: getattr(metric, name) for name in names}


def _make_default(metric: Any) -> dict[str, Any]:
    defaults = metric._defaults  # noqa: SLF001 - of torchmetrics
    state: dict[str, Any] = {
        name: value.detach().clone().to(metric.device) if isinstance(value, Tensor) else []
        for name, value in defaults.items()
    }
    return {**state, _COUNT: 0}


def _decode(metric: Any, packed: Tensor) -> dict[str, Any]:
    state = decode_plain(unpack_bytes(packed), metric.device)
    return {name: state[name] for name in _make_default(metric)}  # no other attribute is set


def _join(metric: Any, states: list[dict[str, Any]], *, keeps_lists: bool = False) -> None:
    """Set a metric to the state of several ranks, as torchmetrics does for processes."""
    for name, reduction in metric._reductions.items():  # noqa: SLF001 - of torchmetrics
        values = [state[name] for state in states]
        if isinstance(values[0], Tensor):
            gathered: Any = torch.stack(values)
        else:
            gathered = [part for value in values for part in value]
        # An update appends to a list.
        is_kept = reduction is None or (
            isinstance(gathered, list) and (keeps_lists or not gathered)
        )
        setattr(metric, name, gathered if is_kept else reduction(gathered))


def _divide(metric: Any, state: dict[str, Any], rank: int, ranks: int) -> dict[str, Any]:
    """Return the part of a logical rank in a state of all: together, the parts give that state."""
    divided = _make_default(metric)
    for name, reduction in metric._reductions.items():  # noqa: SLF001 - of torchmetrics
        value, default = state[name], divided[name]
        if isinstance(value, list) or reduction is dim_zero_sum:
            # The first one has all, so that each sample counts once.
            divided[name] = copy(value) if rank == 0 else default
        else:
            # A state without a reduction has a row for each logical rank. The largest, the smallest
            # and the mean of equal values are these.
            is_stacked = reduction is None and value.shape == (ranks, *default.shape)
            divided[name] = value[rank] if is_stacked else value
        if isinstance(divided[name], Tensor):
            divided[name] = divided[name].clone()
    return {**divided, _COUNT: state[_COUNT] if rank == 0 else 1}
