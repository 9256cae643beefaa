"""Refusal of arguments that a replacement does not take.

A replacement accepts exactly what torch's kernel accepts. Where a cheap check shows that torch
would raise, the replacement refuses, and torch's own kernel is called to raise its error.
"""

import torch
from torch import Tensor


class RefusedError(Exception):
    """A replacement does not take its arguments."""


def require(*conditions: bool) -> None:
    """Refuse the arguments unless all conditions hold."""
    if not all(conditions):
        raise RefusedError


def require_everywhere(condition: Tensor) -> None:
    """Refuse the arguments unless a condition on values holds everywhere.

    On CUDA the check runs on the device, as in torch's own kernels, and the host does not wait: a
    failed check is a device-side assertion, which surfaces as an error at a later call.
    """
    torch.ops.aten._assert_async(condition.all())  # noqa: SLF001 - it does not wait for the device


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype to add in: float32 for half and bfloat16, else the dtype itself."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
