"""Refusal of arguments that a replacement does not take.

A replacement accepts exactly what torch's kernel accepts. Where a cheap check shows that torch
would raise, the replacement refuses, and torch's own kernel is called to raise its error.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor


class RefusedError(Exception):
    """A replacement does not take its arguments."""


def require(*conditions: bool) -> None:
    """Refuse the arguments unless all conditions hold."""
    if not all(conditions):
        raise RefusedError


Function = Callable[..., Tensor]
"""A function of an op's arguments.

It holds for any tensors of the same shapes, strides, dtypes and devices as those with which it was
made, and is made once for them.
"""


class Update(NamedTuple):
    """A change of the tensor ``self``: in place, or of a copy.

    Attributes:
        write: A :data:`Function` of the tensor to change and of the op's other arguments.
    """

    write: Callable[..., None]


@lru_cache(maxsize=4096)
def make_places(device: torch.device, *sizes: int) -> Tensor:
    """Return a tensor of a shape, in the memory of one element: reading a place outside fails."""
    return torch.zeros((), dtype=torch.uint8, device=device).expand(sizes)


def lay_out(result: Tensor, memory_format: torch.memory_format) -> Tensor:
    """Return a contiguous result with the strides of a memory format."""
    if memory_format == torch.contiguous_format:
        return result
    return torch.empty_like(result, memory_format=memory_format).copy_(result)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype to add in: float32 for half and bfloat16, else the dtype itself."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
