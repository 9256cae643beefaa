"""``index_reduce``: slices reduced where an index says.

torch's CUDA kernel starts one thread per element of the source, which reduces with atomics; torch
refuses it for every reduction. Of floating point even the maximum depends on the order: of -0.0
and 0.0, and of NaNs with different payloads, the first one stays.
"""

from functools import partial

import torch
from torch import Tensor

from lightning_d9m.patches.primitives.fallback import Original, holds, raise_as_original
from lightning_d9m.patches.primitives.segment_reduce import Reduction, Update, reduce_into

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
) -> Update:
    """Reduce the source's slices into a tensor, from first to last."""
    bound = partial(original, self, dim, index, source, reduce, include_self=include_self)
    dims = max(self.dim(), 1)
    axis = dim % dims if -dims <= dim < dims else -1
    if not _can_reduce(self, axis, index, source, reduce):
        raise_as_original(bound)
    if not source.numel() or not self.numel():
        return Update(lambda _: None)
    keys = index.reshape(-1)
    count = self.shape[axis] if self.dim() else 1
    if not holds((keys >= 0) & (keys < count)):
        raise_as_original(bound)
    slices = (source if source.dim() else source.view(1)).movedim(axis, 0)

    def write(target: Tensor) -> None:
        reduce_into(
            (target if target.dim() else target.view(1)).movedim(axis, 0),
            (keys,),
            keys,
            count,
            slices,
            _REDUCTIONS[reduce],
            include_self=include_self,
            mean=reduce == "mean",
        )

    return Update(write)


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
