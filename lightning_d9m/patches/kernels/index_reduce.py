"""``index_reduce``: slices reduced where an index says.

torch's CUDA kernel starts one thread per element of the source, which reduces with atomics; torch
refuses it for every reduction. Of floating point even the maximum depends on the order: of -0.0
and 0.0, and of NaNs with different payloads, the first one stays.

Here a mean is an exact sum (see ``exact_sums``), divided by a count; a maximum is that of integers
in the order of the numbers, in which -0.0 is less than 0.0 and all NaNs are one. Both are the same
in any order. The factors of a product are sorted by place.
"""

from functools import partial

import torch
from torch import Tensor

from lightning_d9m.patches.kernels.places import add_to_sums, sum_by_index, update_places
from lightning_d9m.patches.primitives.fallback import Original, holds, raise_as_original
from lightning_d9m.patches.primitives.segment_reduce import (
    Update,
    accumulation_dtype,
    multiply_into,
)

_REDUCTIONS = ("prod", "mean", "amax", "amin")


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
    """Reduce the source's slices into a tensor; products are formed from first to last."""
    bound = partial(original, self, dim, index, source, reduce, include_self=include_self)
    dims = max(self.dim(), 1)
    axis = dim % dims if -dims <= dim < dims else -1
    if not _can_reduce(self, axis, index, source, reduce):
        raise_as_original(bound)
    if not source.numel():
        return Update(lambda _: None)
    keys = index.reshape(-1)
    count = self.shape[axis] if self.dim() else 1
    if not holds((keys >= 0) & (keys < count)):
        raise_as_original(bound)
    slices = (source if source.dim() else source.view(1)).movedim(axis, 0)

    def write(target: Tensor) -> None:
        places = (target if target.dim() else target.view(1)).movedim(axis, 0)
        if reduce == "prod":
            multiply_into(places, (keys,), keys, count, slices, include_self=include_self)
            return
        update = _average if reduce == "mean" else partial(_choose, greatest=reduce == "amax")
        update = partial(update, include_self=include_self)
        update_places(places, (count,), keys, slices, update)

    return Update(write)


def _average(rows: Tensor, keys: Tensor, values: Tensor, *, include_self: bool) -> None:
    """Replace each row that gets a value by the mean."""
    count, dtype = len(rows), accumulation_dtype(rows.dtype)
    divisors = _count_terms(rows, keys)
    if not rows.is_floating_point():
        total = rows.clone() if include_self else torch.zeros_like(rows)
        total.index_add_(0, keys, values)
    elif include_self:
        total = rows.to(dtype, copy=True)
        add_to_sums(total.view(1, count, -1), keys, values.reshape(1, len(keys), -1), include=True)
    else:
        total = sum_by_index(keys, values.reshape(1, len(keys), -1), count, dtype).view_as(rows)
    terms = (divisors + include_self).clamp(min=1).to(dtype)
    rounding = None if rows.is_floating_point() else "floor"
    mean = torch.div(total, terms, rounding_mode=rounding)
    rows.copy_(torch.where(divisors > 0, mean.to(rows.dtype), rows))


def _choose(
    rows: Tensor, keys: Tensor, values: Tensor, *, greatest: bool, include_self: bool
) -> None:
    """Replace each row that gets a value by the greatest or the least one."""
    own, given = (_order(part, greatest=greatest) for part in (rows, values))
    chosen = own.clone() if include_self else torch.full_like(own, torch.iinfo(own.dtype).min)
    index = keys.to(torch.int64).view(-1, *[1] * (rows.dim() - 1)).expand_as(given)
    chosen.scatter_reduce_(0, index, given, "amax")
    kept = chosen == own if include_self else _count_terms(rows, keys) == 0
    rows.copy_(torch.where(kept, rows, _restore(chosen, rows.dtype, greatest=greatest)))


def _count_terms(rows: Tensor, keys: Tensor) -> Tensor:
    """Return how many values each row gets, of shape ``[count, 1, ...]``."""
    terms = torch.zeros(len(rows), dtype=torch.int64, device=rows.device)
    terms.index_add_(0, keys, torch.ones_like(keys, dtype=torch.int64))
    return terms.view(-1, *[1] * (rows.dim() - 1))


def _order(values: Tensor, *, greatest: bool) -> Tensor:
    """Return integers whose order is that of the numbers, or the reverse; a NaN is the greatest."""
    if not values.is_floating_point():
        ordered = values.to(torch.int64)
        return ordered if greatest else ~ordered
    values = values.to(accumulation_dtype(values.dtype))
    integer = torch.int64 if values.dtype == torch.float64 else torch.int32
    limits = torch.iinfo(integer)
    bits = values.contiguous().view(integer)
    ordered = torch.where(bits < 0, bits ^ limits.max, bits)
    return torch.where(values.isnan(), limits.max, ordered if greatest else ~ordered)


def _restore(ordered: Tensor, dtype: torch.dtype, *, greatest: bool) -> Tensor:
    """Return the numbers of :func:`_order`."""
    limits = torch.iinfo(ordered.dtype)
    plain = ordered if greatest else ~ordered
    if not dtype.is_floating_point:
        return plain.to(dtype)
    bits = torch.where(plain < 0, plain ^ limits.max, plain)
    values = bits.view(accumulation_dtype(dtype))
    return torch.where(ordered == limits.max, torch.nan, values).to(dtype)


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
