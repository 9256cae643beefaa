"""Refusal of arguments that a replacement does not take.

A replacement accepts exactly what torch's kernel accepts. Where a cheap check shows that torch
would raise, the replacement refuses, and torch's own kernel is called to raise its error.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor


class RefusedError(Exception):
    """A replacement does not take its arguments."""


def require(*conditions: bool) -> None:
    """Refuse the arguments unless all conditions hold."""
    if not all(conditions):
        raise RefusedError


def require_places(index: Tensor, shape: Sequence[int], axis: int = 0) -> None:
    """Refuse the arguments unless an index has places of a dimension of a shape only.

    ``gather`` checks it, in one launch. On CUDA the host does not wait: a place outside is a
    device-side assertion, as in torch's own kernels, which surfaces as an error at a later call.
    """
    if index.dtype != torch.int64:
        index = index.to(torch.int64)
    if index.dim() == 1:
        _make_places(index.device, shape[axis]).gather(0, index)
    else:
        sizes = [*index.shape[:axis], shape[axis], *index.shape[axis + 1 :]]
        _make_places(index.device).expand(sizes).gather(axis, index)


@lru_cache(maxsize=4096)
def _make_places(device: torch.device, *sizes: int) -> Tensor:
    return torch.zeros((), dtype=torch.uint8, device=device).expand(sizes)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype to add in: float32 for half and bfloat16, else the dtype itself."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
