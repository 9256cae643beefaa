"""States of torchmetrics metrics by logical rank."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torchmetrics import MetricCollection

from lightning_d9m.attribute_patches import AttributePatches
from lightning_d9m.errors import SettingError
from lightning_d9m.lightning.resume.metric_state import find_metrics, move, to_plain
from lightning_d9m.recording.plain_data import decode_plain, encode_plain

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

_COUNT = "_update_count"


class MetricStates:
    """Keeps a state of each metric for each logical rank, and reduces all of them at once.

    Float sums then add in an order that the number of processes does not decide.

    The metrics are in the module and the callbacks. ``current`` returns the logical rank whose
    micro-batch is computed now, or None, and ``gather`` the bytes of every process.
    """

    def __init__(
        self,
        trainer: "Trainer",
        block: range,
        current: Callable[[], int | None],
        gather: Callable[[bytes], list[bytes]],
    ) -> None:
        self._found = find_metrics(trainer)
        self._metrics = [
            metric
            for metric in dict.fromkeys(self._found.values())
            if not isinstance(metric, MetricCollection)
        ]
        self._block = block
        self._current = current
        self._gather = gather
        self._states: dict[tuple[int, int], dict[str, Any]] = {}

    def attach(self, patches: AttributePatches) -> None:
        """Let the metrics reset and synchronize the states of all logical ranks."""
        for metric in self._metrics:
            patches.replace(metric, "reset", partial(self._reset, metric, metric.reset))
            patches.replace(metric, "_sync_dist", partial(self._synchronize, metric))
            patches.replace(metric, "distributed_available_fn", _always)
        for collection in self._found.values():
            if isinstance(collection, MetricCollection):
                # Metrics of a group share the state of the first, and here each has several.
                for name, value in (
                    ("_enable_compute_groups", False),
                    ("_groups_checked", False),
                    ("_groups", {}),
                ):
                    patches.replace(collection, name, value)

    def enter(self, logical_rank: int) -> None:
        """Set the metrics to the states of a logical rank."""
        for metric in self._metrics:
            state = self._states.get((id(metric), logical_rank)) or _make_default(metric)
            for name, value in state.items():
                setattr(metric, name, value)
            metric._computed = None  # noqa: SLF001 - of torchmetrics, which has no setter

    def leave(self, logical_rank: int) -> None:
        """Keep the states of a logical rank."""
        for metric in self._metrics:
            names = [*metric._defaults, _COUNT]  # noqa: SLF001 - of torchmetrics
            state = {name: getattr(metric, name) for name in names}
            self._states[id(metric), logical_rank] = state

    def capture(self) -> dict[str, dict[int, Any]]:
        """Return copies of the states by path and logical rank."""
        return {
            path: {
                rank: to_plain(self._states[id(metric), rank])
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
                    self._states[id(metric), rank] = move(by_rank[rank], metric.device)

    def _reset(self, metric: Any, reset: Callable[[], None]) -> None:
        if self._current() is None:
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
        own = {
            rank: to_plain(self._states.get((id(metric), rank)) or _make_default(metric))
            for rank in self._block
        }
        by_rank: dict[int, dict[str, Any]] = {}
        for part in self._gather(encode_plain(own)):
            by_rank |= decode_plain(part)
        states = [move(by_rank[rank], metric.device) for rank in sorted(by_rank)]
        for name, reduction in metric._reductions.items():  # noqa: SLF001 - of torchmetrics
            setattr(metric, name, _reduce([state[name] for state in states], reduction))


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


def _always() -> bool:
    return True
