"""Updates of a tensor by an index: ``index_add``, ``scatter``, ``index_put``, ``put_`` and others.

torch's CUDA kernels start one thread for each value, which adds, multiplies or writes with no
regard to the other threads of its place. Each function here turns the arguments into keys and
values, and names the rule of ``places`` that combines them.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from lightning_d9m.patches.arguments import accumulation_dtype, require, require_places
from lightning_d9m.patches.kernels.places import Update, add_to_sums, gets_few, update_places

_INDEX_DTYPES = (torch.int32, torch.int64)
_LEGACY = {"add": "sum", "multiply": "prod"}
_NOTHING = Update(lambda _: None)


def index_add(self: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: float = 1) -> Update:
    """Add the source's slices where the index says."""
    require(_is_added(self), index.dim() == 1, source.numel() > 0, source.dtype == self.dtype)
    if alpha != 1:
        source = source.to(accumulation_dtype(source.dtype)) * alpha
    return _update_slices(self, dim, index, source, "sum")


def index_reduce(
    self: Tensor, dim: int, index: Tensor, source: Tensor, reduce: str, *, include_self: bool = True
) -> Update:
    """Reduce the source's slices into a tensor; products are formed from first to last."""
    require(
        reduce in {"prod", "mean", "amax", "amin"},
        index.dim() <= 1,
        source.dtype == self.dtype,
        not (self.is_complex() or self.dtype == torch.bool),
    )
    return _update_slices(self, dim, index, source, reduce, include_self=include_self)


def _update_slices(
    self: Tensor, dim: int, index: Tensor, source: Tensor, reduce: str, *, include_self: bool = True
) -> Update:
    dims = max(self.dim(), 1)
    require(-dims <= dim < dims, index.dtype in _INDEX_DTYPES, source.dim() == self.dim())
    rows, slices, keys = _as_rows(self, dim), _as_rows(source, dim), index.reshape(-1)
    require(slices.shape[:1] == keys.shape, slices.shape[1:] == rows.shape[1:])
    if not source.numel():
        return _NOTHING
    require_places(keys, rows.shape)
    sizes, more = rows.shape[:1], {"include_self": include_self}
    return Update(lambda t: update_places(_as_rows(t, dim), sizes, keys, slices, reduce, **more))


def _as_rows(values: Tensor, dim: int) -> Tensor:
    if not values.dim():
        return values.view(1)
    return values.movedim(dim, 0) if dim else values


def _is_added(values: Tensor) -> bool:
    return values.is_floating_point() or values.is_complex()


def scatter_reduce(
    self: Tensor, dim: int, index: Tensor, src: Tensor, reduce: str, *, include_self: bool = True
) -> Any:
    """Multiply the source's elements into a tensor, from first to last."""
    if reduce != "prod":
        return NotImplemented
    return _scatter(self, dim, index, src, "prod", include_self=include_self)


def scatter(self: Tensor, dim: int, index: Tensor, src: Tensor, *, reduce: str) -> Update:
    """Add the source's elements to a tensor, or multiply them into it from first to last."""
    require(reduce in _LEGACY)
    return _scatter(self, dim, index, src, _LEGACY[reduce])


def scatter_add(self: Tensor, dim: int, index: Tensor, src: Tensor) -> Update:
    """Add the source's elements to a tensor."""
    return _scatter(self, dim, index, src, "sum")


def _scatter(
    self: Tensor, dim: int, index: Tensor, src: Tensor, reduce: str, *, include_self: bool = True
) -> Update:
    dims = max(self.dim(), 1)
    shape, wanted, given = (part.shape or torch.Size([1]) for part in (self, index, src))
    axis = dim % dims
    require(-dims <= dim < dims, index.dtype in _INDEX_DTYPES, src.dtype == self.dtype)
    if not index.numel():
        return _NOTHING
    require(
        len(shape) == len(wanted) == len(given),
        all(
            want <= give and (want <= have or side == axis)
            for side, (have, want, give) in enumerate(zip(shape, wanted, given, strict=False))
        ),
    )
    index, values = index.reshape(wanted), src.view(given)[tuple(slice(size) for size in wanted)]
    require_places(index, shape, axis)

    def write(target: Tensor) -> None:
        target = target.view(shape)
        alike = wanted[:axis] + wanted[axis + 1 :] == shape[:axis] + shape[axis + 1 :]
        if reduce == "sum" and alike and self.is_floating_point() and not gets_few(target, values):
            _add_along(target, axis, index, values)
            return
        flat = target.view(-1) if target.is_contiguous() else target
        places, more = _find_places(index, shape, axis), {"include_self": include_self}
        update_places(flat, flat.shape, places, values.flatten(), reduce, **more)

    return Update(write)


def _add_along(target: Tensor, axis: int, index: Tensor, values: Tensor) -> None:
    """Add to one dimension; the others are those of the target, so places are not spelled out."""
    whole = target.contiguous()
    outer, inner = prod(target.shape[:axis]), prod(target.shape[axis + 1 :])
    sums, keys, terms = (
        part.reshape(outer, part.shape[axis], inner) for part in (whole, index, values)
    )
    add_to_sums(sums, keys, terms, include=True)
    if whole is not target:
        target.copy_(whole)


def _find_places(index: Tensor, shape: torch.Size, axis: int) -> Tensor:
    """Return the position in the flattened result that each element of the index stands for."""
    places, stride = torch.zeros_like(index, dtype=torch.int64), 1
    for side in reversed(range(len(shape))):
        ranks = torch.arange(index.shape[side], device=index.device)
        ranks = ranks.view([-1] + [1] * (len(shape) - 1 - side))
        places = places + (index if side == axis else ranks) * stride
        stride *= shape[side]
    return places.flatten()


def index_put_impl(
    self: Tensor,
    indices: Sequence[Tensor | None],
    values: Tensor,
    accumulate: bool = False,
    unsafe: bool = False,  # noqa: ARG001 - torch's argument
) -> Any:
    """Add the values where the indices of the first dimensions say."""
    if not accumulate:
        return NotImplemented
    given = [index for index in indices if index is not None]
    require(
        _is_added(self),
        0 < len(given) == len(indices) <= self.dim(),
        all(index.dtype in _INDEX_DTYPES for index in given),
        values.dtype == self.dtype,
        self.numel() > 0,
    )
    sizes, rest = self.shape[: len(given)], self.shape[len(given) :]
    indexes = torch.broadcast_tensors(*given)
    rows = values.expand((*indexes[0].shape, *rest))
    require(rows.numel() > 0)
    keys: Any = 0
    for index, size in zip(indexes, sizes, strict=True):
        keys = keys * size + _count_from_start(index.flatten(), size)
    rows = rows.reshape(len(keys), *rest)
    return Update(lambda target: update_places(target, sizes, keys, rows, "sum"))


def _count_from_start(index: Tensor, size: int) -> Tensor:
    """Return places that may be counted from the end, counted from the start."""
    require_places(index + size, [2 * size])
    return index.remainder(size)


def put(self: Tensor, index: Tensor, source: Tensor, accumulate: bool = False) -> Update:
    """Write the source into a tensor, at positions counted as if it were flat, or add it.

    torch's CPU kernel, on one thread, goes from first to last: the last value stays.
    """
    size = self.numel()
    require(
        index.dtype == torch.int64,
        source.dtype == self.dtype,
        source.numel() == index.numel(),
        size > 0 or not index.numel(),
    )
    if not index.numel():
        return _NOTHING
    places, values = _count_from_start(index.flatten(), size), source.flatten()
    shape = self.shape or torch.Size([1])
    reduce = "sum" if accumulate else "last"
    return Update(lambda t: update_places(t.view(shape), shape, places, values, reduce))
