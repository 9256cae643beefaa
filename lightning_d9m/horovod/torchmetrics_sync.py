"""Make torchmetrics gather over Horovod instead of ``torch.distributed``."""

import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn import Module


class MetricSync:
    """Make the metrics of a module gather over the ranks until `release`.

    Args:
        module: Its metrics, at any depth, are modified in place.
        gather: Returns every rank's tensor, like ``dist_sync_fn`` of torchmetrics.
    """

    def __init__(self, module: Module, gather: Callable[[Tensor, Any], list[Tensor]]) -> None:
        self._previous: list[tuple[Any, Any, Any]] = []
        torchmetrics = sys.modules.get("torchmetrics")
        if torchmetrics is None:
            return
        for metric in module.modules():
            if isinstance(metric, torchmetrics.Metric) and metric.dist_sync_fn is None:
                state = (metric, metric.dist_sync_fn, metric.distributed_available_fn)
                self._previous.append(state)
                metric.dist_sync_fn = gather
                metric.distributed_available_fn = _always

    def release(self) -> None:
        """Restore the metrics' own functions."""
        for metric, sync, available in self._previous:
            metric.dist_sync_fn = sync
            metric.distributed_available_fn = available
        self._previous = []


def _always() -> bool:
    return True
