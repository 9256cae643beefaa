"""``index_reduce``: slices reduced where an index says.

torch's CUDA kernel starts one thread per element of the source, which meet with atomics, and is
refused whatever the reduction. Of floating point even the maximum depends on the order: of -0.0
and 0.0, and of NaNs with several payloads, the first stays.
"""

import torch
from torch import Tensor

from lightning_d9m.patches.primitives.fallback import (
    Original,
    holds,
    overlaps_itself,
    raise_as_original,
)
from lightning_d9m.patches.primitives.segment_reduce import Reduction, reduce_segments, sum_segments

_REDUCTIONS: dict[str, Reduction] = {"prod": "prod", "mean": "sum", "amax": "max", "amin": "min"}


def index_reduce(
    original: Original,
    self: Tensor,
    dim: int,
    index: Tensor,
    source: Tensor,
    reduce: str,
    *,
    include_self: bool = True,
) -> Tensor:
    """Return a copy with the source's slices reduced into it, from first to last."""
    dims = max(self.dim(), 1)
    if not _can_reduce(self, dim % dims if -dims <= dim < dims else -1, index, source, reduce):
        raise_as_original(original, self, dim, index, source, reduce, include_self=include_self)
    given = (source if source.dim() else source.view(1)).movedim(dim, 0)
    before = (self if self.dim() else self.view(1)).movedim(dim, 0)
    if not given.numel() or not before.numel():
        return self.clone(memory_format=torch.contiguous_format)
    keys = index.reshape(-1)
    if not holds((keys >= 0) & (keys < len(before))):
        raise_as_original(original, self, dim, index, source, reduce, include_self=include_self)
    rows, features = before.reshape(len(before), -1), given.reshape(len(given), -1)
    touched = sum_segments(keys, torch.ones_like(keys, dtype=torch.int64).unsqueeze(1), len(rows))
    if include_self:
        first = torch.arange(len(rows), dtype=keys.dtype, device=keys.device)
        keys, features = torch.cat([first, keys]), torch.cat([rows, features])
    reduced = reduce_segments(keys, features, len(rows), _REDUCTIONS[reduce])
    if reduce == "mean":
        rounding = None if reduced.is_floating_point() else "floor"
        divisors = (touched + include_self).clamp(min=1).to(reduced.dtype)
        reduced = torch.div(reduced, divisors, rounding_mode=rounding)
    after = torch.where(touched > 0, reduced.to(self.dtype), rows)
    return after.view(before.shape).movedim(0, dim).reshape(self.shape).contiguous()


def index_reduce_(
    original: Original,
    self: Tensor,
    dim: int,
    index: Tensor,
    source: Tensor,
    reduce: str,
    *,
    include_self: bool = True,
) -> Tensor:
    """Reduce the source's slices into a tensor, from first to last."""
    if overlaps_itself(self):
        raise_as_original(original, self, dim, index, source, reduce, include_self=include_self)
    result = index_reduce(original, self, dim, index, source, reduce, include_self=include_self)
    return self.copy_(result)


def _can_reduce(self: Tensor, axis: int, index: Tensor, source: Tensor, reduce: str) -> bool:
    shape, given = (part.shape or torch.Size([1]) for part in (self, source))
    return (
        reduce in _REDUCTIONS
        and self.dim() == source.dim()
        and 0 <= axis < len(given)
        and index.dim() <= 1
        and index.dtype in (torch.int32, torch.int64)
        and source.dtype == self.dtype
        and not (self.is_complex() or self.dtype == torch.bool)
        and given[axis] == index.numel()
        and given[:axis] + given[axis + 1 :] == shape[:axis] + shape[axis + 1 :]
    )
