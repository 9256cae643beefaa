"""``scatter`` and ``scatter_reduce``: elements reduced where an index says.

torch's CUDA kernels multiply and add with atomics. What they do deterministically (assigning, and
the reductions of ``scatter_reduce`` other than the product) is left to them.
"""

from collections.abc import Callable
from functools import partial
from typing import NoReturn

import torch
from torch import Tensor

from lightning_d9m.patches.primitives.fallback import (
    Original,
    holds,
    overlaps_itself,
    raise_as_original,
)
from lightning_d9m.patches.primitives.segment_reduce import Reduction, reduce_segments

_LEGACY: dict[str, Reduction] = {"add": "sum", "multiply": "prod"}


def scatter_reduce(
    original: Original,
    self: Tensor,
    dim: int,
    index: Tensor,
    src: Tensor,
    reduce: str,
    *,
    include_self: bool = True,
) -> Tensor:
    """Return a copy with the source's elements multiplied in, from first to last."""
    arguments = (self, dim, index, src)
    if reduce != "prod":
        result: Tensor = original(*arguments, reduce, include_self=include_self)
        return result
    refuse = partial(raise_as_original, original, *arguments, reduce, include_self=include_self)
    return _scatter(refuse, *arguments, "prod", include_self=include_self)


def scatter_reduce_(
    original: Original,
    self: Tensor,
    dim: int,
    index: Tensor,
    src: Tensor,
    reduce: str,
    *,
    include_self: bool = True,
) -> Tensor:
    """Multiply the source's elements into a tensor, from first to last."""
    arguments = (self, dim, index, src)
    if reduce != "prod":
        result: Tensor = original(*arguments, reduce, include_self=include_self)
        return result
    refuse = partial(raise_as_original, original, *arguments, reduce, include_self=include_self)
    if overlaps_itself(self):
        refuse()
    return self.copy_(_scatter(refuse, *arguments, "prod", include_self=include_self))


def scatter(
    original: Original, self: Tensor, dim: int, index: Tensor, src: Tensor, *, reduce: str
) -> Tensor:
    """Return a copy with the source's elements added or multiplied in, from first to last."""
    refuse = partial(raise_as_original, original, self, dim, index, src, reduce=reduce)
    if reduce not in _LEGACY:
        refuse()
    return _scatter(refuse, self, dim, index, src, _LEGACY[reduce])


def scatter_(
    original: Original, self: Tensor, dim: int, index: Tensor, src: Tensor, *, reduce: str
) -> Tensor:
    """Add or multiply the source's elements into a tensor, from first to last."""
    if overlaps_itself(self):
        raise_as_original(original, self, dim, index, src, reduce=reduce)
    return self.copy_(scatter(original, self, dim, index, src, reduce=reduce))


def scatter_add(original: Original, self: Tensor, dim: int, index: Tensor, src: Tensor) -> Tensor:
    """Return a copy with the source's elements added, from first to last."""
    refuse = partial(raise_as_original, original, self, dim, index, src)
    return _scatter(refuse, self, dim, index, src, "sum")


def scatter_add_(original: Original, self: Tensor, dim: int, index: Tensor, src: Tensor) -> Tensor:
    """Add the source's elements to a tensor, from first to last."""
    if overlaps_itself(self):
        raise_as_original(original, self, dim, index, src)
    return self.copy_(scatter_add(original, self, dim, index, src))


def _scatter(
    refuse: Callable[[], NoReturn],
    self: Tensor,
    dim: int,
    index: Tensor,
    src: Tensor,
    reduce: Reduction,
    *,
    include_self: bool = True,
) -> Tensor:
    dims = max(self.dim(), 1)
    shapes = [part.shape if part.dim() else torch.Size([1]) for part in (self, index, src)]
    axis = dim % dims
    if (
        not -dims <= dim < dims
        or index.dtype not in (torch.int32, torch.int64)
        or src.dtype != self.dtype
        or (index.numel() and len({len(shape) for shape in shapes}) > 1)
        or any(
            wanted > given or (wanted > kept and side != axis)
            for side, (kept, wanted, given) in enumerate(zip(*shapes, strict=False))
            if index.numel()
        )
    ):
        refuse()
    if not index.numel():
        return self.clone()
    kept, wanted, _ = shapes
    places = _find_places(index.reshape(wanted).to(torch.int64), kept, axis)
    if not holds((index >= 0) & (index < kept[axis])):
        refuse()
    given = src.view(shapes[2])[tuple(slice(size) for size in wanted)].flatten()
    before = self.flatten()
    if include_self:
        keys = torch.cat([torch.arange(before.numel(), device=places.device), places])
        after = reduce_segments(keys, torch.cat([before, given]), before.numel(), reduce)
    else:
        touched = torch.zeros_like(before, dtype=torch.bool).index_fill_(0, places, True)  # noqa: FBT003 - an argument of torch's
        after = reduce_segments(places, given, before.numel(), reduce).to(self.dtype)
        after = torch.where(touched, after, before)
    return after.to(self.dtype).view(self.shape)


def _find_places(index: Tensor, shape: torch.Size, axis: int) -> Tensor:
    """Return the position in the flattened result that each element of the index stands for."""
    places, stride = torch.zeros_like(index), 1
    for side in reversed(range(len(shape))):
        ranks = torch.arange(index.shape[side], device=index.device)
        ranks = ranks.view([-1] + [1] * (len(shape) - 1 - side))
        places = places + (index if side == axis else ranks) * stride
        stride *= shape[side]
    return places.flatten()
