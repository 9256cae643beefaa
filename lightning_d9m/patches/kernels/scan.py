"""Cumulative products and log-sums of a single row.

torch's CUDA kernel for tensors of one row is a scan of the CUB library, in which a block adds what
the blocks before it have finished by then: the partial results depend on timing. The kernel for
several rows scans each row within one block, in a fixed order.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_d9m.patches.primitives.fallback import Original


def _scan(
    original: Original, self: Tensor, dim: int, *, scan: Callable[..., Tensor], **dtype: Any
) -> Any:
    """Scan the only row of a tensor as the first of two equal ones; any other tensor as torch does.

    Integers are multiplied exactly, in any order.
    """
    result = dtype.get("dtype") or self.dtype
    exact = not (result.is_floating_point or result.is_complex)
    inside = -self.dim() <= dim < self.dim()
    if exact or not inside or self.numel() != self.shape[dim] or self.numel() <= 1:
        return original(self, dim, **dtype)
    return scan(self.reshape(1, -1).expand(2, -1), 1, **dtype)[0].view(self.shape)


cumprod = partial(_scan, scan=torch.cumprod)
logcumsumexp = partial(_scan, scan=torch.logcumsumexp)
