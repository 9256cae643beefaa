"""Make torchmetrics gather over Horovod instead of ``torch.distributed``."""

import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn import Module

from lightning_d9m.attribute_patches import AttributePatches


def synchronize_metrics(
    patches: AttributePatches, module: Module, gather: Callable[[Tensor, Any], list[Tensor]]
) -> None:
    """Make the metrics of a module gather over the ranks, until the patches are undone.

    ``gather`` returns every rank's tensor, like ``dist_sync_fn`` of torchmetrics.
    """
    torchmetrics = sys.modules.get("torchmetrics")
    if torchmetrics is None:
        return
    for metric in module.modules():
        if isinstance(metric, torchmetrics.Metric) and metric.dist_sync_fn is None:
            patches.replace(metric, "dist_sync_fn", gather)
            patches.replace(metric, "distributed_available_fn", _always)


def _always() -> bool:
    return True
