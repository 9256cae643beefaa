"""Ops in which an index names the place of each value, such as ``index_add`` and ``bincount``.

torch's CUDA kernels start one thread for each value, which adds, multiplies or writes with no
regard to the other threads of its place. Here an op turns its arguments into keys and values, and
names the rule that combines the values of a place. The result is the same in any order of the
values, except that products and the last value follow the order in which the values are given.
"""

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from operator import le
from typing import Any

import torch
from torch import Tensor

from lightning_d9m.patches.arguments import Update, accumulation_dtype, make_places, require
from lightning_d9m.patches.exact_sums import Layout, Pieces, accumulate, plan_pieces
from lightning_d9m.patches.triton.launch import allocate

_MANY = 2  # elements for each value, beyond which only those that get a value are read
_MODE_MAX = 2
_INDEX_DTYPES = (torch.int32, torch.int64)
_LEGACY = {"add": "sum", "multiply": "prod"}
_NOTHING = Update(lambda *_, **__: None)


def index_add(self: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: float = 1) -> Update:  # noqa: ARG001 - a factor of the source
    """Add the source's slices where the index says."""
    require(_is_added(self), index.dim() == 1, source.numel() > 0)
    return _plan(self, dim, index, source, "sum", by_slice=True)


def index_reduce(
    self: Tensor, dim: int, index: Tensor, source: Tensor, reduce: str, *, include_self: bool = True
) -> Update:
    """Reduce the source's slices into a tensor; products are formed from first to last."""
    require(
        reduce in {"prod", "mean", "amax", "amin"},
        index.dim() <= 1,
        not (self.is_complex() or self.dtype == torch.bool),
    )
    return _plan(self, dim, index, source, reduce, include_self=include_self, by_slice=True)


def scatter_reduce(
    self: Tensor, dim: int, index: Tensor, src: Tensor, reduce: str, *, include_self: bool = True
) -> Any:
    """Multiply the source's elements into a tensor, from first to last."""
    if reduce != "prod":
        return NotImplemented
    return _plan(self, dim, index, src, "prod", include_self=include_self)


def scatter(self: Tensor, dim: int, index: Tensor, src: Tensor, *, reduce: str) -> Update:
    """Add the source's elements to a tensor, or multiply them into it from first to last."""
    require(reduce in _LEGACY)
    return _plan(self, dim, index, src, _LEGACY[reduce])


def scatter_add(self: Tensor, dim: int, index: Tensor, src: Tensor) -> Update:
    """Add the source's elements to a tensor."""
    return _plan(self, dim, index, src, "sum")


def _plan(
    self: Tensor,
    dim: int,
    index: Tensor,
    source: Tensor,
    reduce: str,
    *,
    include_self: bool = True,
    by_slice: bool = False,
) -> Update:
    """Return an update along a dimension, whose index has a place for each element or slice."""
    dims = max(self.dim(), 1)
    require(-dims <= dim < dims, index.dtype in _INDEX_DTYPES, source.dtype == self.dtype)
    if not (by_slice or index.numel()):
        return _NOTHING
    axis = dim % dims
    shape, wanted, given = (tuple(part.shape) or (1,) for part in (self, index, source))
    if by_slice:
        wanted = (*shape[:axis], *wanted, *shape[axis + 1 :])
        require(source.dim() == self.dim(), wanted == given)
    # An index of elements may be shorter than the source, and beside the dimension than the target.
    size = (*wanted[:axis], shape[axis], *wanted[axis + 1 :])
    require(
        len(shape) == len(wanted) == len(given), all(map(le, (*wanted, *size), (*given, *shape)))
    )
    if not prod(wanted):
        return _NOTHING
    narrow_target, narrow_source = map(tuple, (map(slice, size), map(slice, wanted)))
    is_whole, is_scalar = size == shape and wanted == given, 0 in {self.dim(), index.dim()}
    is_sum = reduce == "sum" and self.is_floating_point() and prod(size) <= _MANY * prod(wanted)
    places = make_places(self.device, *((shape[axis],) if by_slice else size))
    add = is_sum and plan_sum(self.dtype, size, index, wanted, axis)

    def write(
        target: Tensor,
        _: int,
        index: Tensor,
        source: Tensor,
        *_more: str,
        alpha: float = 1,
        **__: Any,
    ) -> None:
        if alpha != 1:
            source = source.to(accumulation_dtype(source.dtype)) * alpha
        if is_scalar:
            target, index, source = target.view(shape), index.view(-1), source.view(given)
        _check_places(places, 0 if by_slice else axis, index)
        if not is_whole:
            target, source = target[narrow_target], source[narrow_source]
        if add and target.is_contiguous():
            add(target, index, source)
        elif by_slice:
            slices = target.movedim(axis, 0), index, source.movedim(axis, 0)
            update_rows(*slices, reduce, include_self=include_self)
        else:
            outer, rows, inner = _divide(wanted, axis)
            lines = torch.arange(outer, device=index.device).view(-1, 1, 1) * shape[axis]
            keys = (lines + index.reshape(outer, rows, inner)) * inner
            keys = (keys + torch.arange(inner, device=index.device)).flatten()
            _update_flat(target, (-1,), keys, source.flatten(), reduce, include_self=include_self)

    return Update(write)


def _check_places(places: Tensor, axis: int, index: Tensor) -> None:
    """Raise unless an index has places of a dimension only, in one launch.

    On CUDA the host does not wait: a place outside is a device-side assertion, as in torch's own
    kernels, which surfaces as an error at a later call.
    """
    places.gather(axis, index if index.dtype == torch.int64 else index.to(torch.int64))


def _is_added(values: Tensor) -> bool:
    return values.is_floating_point() or values.is_complex()


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
    shape = (*torch.broadcast_shapes(*[index.shape for index in given]), *rest)
    require(values.expand(shape).numel() > 0)
    return _plan_places(self, sizes, rest, values, shape, "sum")


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
    reduce = "sum" if accumulate else "last"
    return _plan_places(self, (size,), (), source, source.shape, reduce)


def _plan_places(
    self: Tensor,
    sizes: Sequence[int],
    rest: Sequence[int],
    values: Tensor,
    shape: Sequence[int],
    reduce: str,
) -> Update:
    """Return an update of some dimensions as if they were one, by values expanded to a shape."""
    places, rows = make_places(self.device, *sizes), (prod(shape) // prod(rest), *rest)
    is_sum = reduce == "sum" and self.is_floating_point() and prod(shape) * _MANY >= self.numel()
    add = is_sum and plan_sum(self.dtype, (prod(sizes), *rest), None, rows)
    is_laid_out = values.shape == rows

    def write(target: Tensor, indices: Any, values: Tensor, *_more: bool) -> None:
        given: Sequence[Tensor] = [indices] if isinstance(indices, Tensor) else indices
        _ = places[tuple(given)]  # as in _check_places
        if len(given) > 1:
            given = torch.broadcast_tensors(*given)
        keys = given[0].flatten().remainder(sizes[0])  # a place may be counted from the end
        for part, size in zip(given[1:], sizes[1:], strict=True):
            keys = keys * size + part.flatten().remainder(size)
        if not is_laid_out:
            values = values.expand(shape).reshape(rows)
        if add and target.is_contiguous():
            add(target, keys, values)
        else:
            _update_flat(target, (-1, *rest), keys, values, reduce)

    return Update(write)


def _update_flat(
    target: Tensor, shape: Sequence[int], keys: Tensor, values: Tensor, reduce: str, **more: bool
) -> None:
    whole = target.contiguous()
    update_rows(whole.view(shape), keys, values, reduce, **more)
    if whole is not target:
        target.copy_(whole)


def embedding_bag_dense_backward(  # noqa: PLR0913, PLR0917 - torch's arguments
    grad: Tensor,
    indices: Tensor,  # noqa: ARG001 - the rows in the bags
    offset2bag: Tensor,  # noqa: ARG001 - the bag of each entry
    bag_size: Tensor,
    maximum_indices: Tensor,
    num_weights: int,
    scale_grad_by_freq: bool,
    mode: int,
    per_sample_weights: Tensor | None,
    padding_idx: int = -1,  # noqa: ARG001 - a row that the bags skip
) -> Any:
    """Return the gradient with respect to the table, of shape ``[num_weights, features]``.

    Only that of mode max varies. ``maximum_indices`` has the row of the maximum for each bag and
    feature, and ``bag_size`` the number of entries of each bag.
    """
    if mode != _MODE_MAX:
        return NotImplemented
    require(
        per_sample_weights is None,
        not scale_grad_by_freq,
        grad.dim() == 2,  # noqa: PLR2004 - a number of dimensions
        maximum_indices.shape == grad.shape,
        bag_size.shape == grad.shape[:1],
    )
    index = torch.where((bag_size > 0).unsqueeze(1), maximum_indices, -1)
    return sum_rows(index, grad, num_weights)


def bincount(self: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Any:
    """Add the weights of equal values.

    The host waits for the smallest and the greatest value, which sizes the result, as in torch.
    """
    if weights is None or (self.dim() == 1 and not self.numel() and minlength >= 0):
        return NotImplemented  # integers are counted exactly in any order
    require(
        self.dim() == 1,
        self.dtype != torch.bool,
        not (self.is_floating_point() or self.is_complex()),
        weights.shape == self.shape,
        minlength >= 0,
    )
    low, high = torch.stack(torch.aminmax(self)).tolist()
    require(low >= 0)
    terms = weights if weights.dtype == torch.float32 else weights.to(torch.float64)
    return sum_rows(self, terms, int(max(high + 1, minlength)))


def sum_rows(index: Tensor, values: Tensor, count: int) -> Tensor:
    """Return the sums of the values of each of ``count`` places; see :func:`plan_sum`."""
    out = allocate((count, *values.shape[1:]), values.dtype, values.device)
    add_rows(out, index, values, include=False)
    return out


def add_rows(out: Tensor, index: Tensor, values: Tensor, *, include: bool) -> None:
    """Write into each row the sum of the values that go to it; see :func:`plan_sum`."""
    plan_sum(out.dtype, out.shape, index, values.shape, include=include)(out, index, values)


def plan_sum(
    dtype: torch.dtype,
    size: Sequence[int],
    index: Tensor | None,
    shape: Sequence[int],
    axis: int = 0,
    *,
    include: bool = True,
    pieces: Pieces | None = None,
) -> Callable[[Tensor, Tensor, Tensor], None]:
    """Return a function that adds values into the places of a dimension that an index names.

    It takes a contiguous tensor to write into, an index and values; each like those given here.

    Args:
        dtype: That of the sums, floating point; the values have float64 only if the sums have.
        size: The shape of the sums.
        index: Of one dimension, or of the values' shape; None for a contiguous one of one
            dimension. A place outside is skipped.
        shape: That of the values, which is that of the sums but for the dimension.
        axis: The dimension.
        include: Whether what is there is a term as well.
        pieces: By default those for all values of the dimension.
    """
    outer, rows, inner = sides = _divide(shape, axis)
    along: Sequence[int] = (0, 1, 0)
    is_view = True
    if index is not None and index.dim() == 1:
        along = (0, index.stride(0), 0)
    elif index is not None:
        lines = index.reshape(sides)
        along, is_view = lines.stride(), lines.data_ptr() == index.data_ptr()
    layout = Layout(1, outer, 1, rows, inner, size[axis], (0, along[0], along[1], along[2]))
    planned = pieces or plan_pieces(dtype, rows + 1)

    def add(out: Tensor, index: Tensor, values: Tensor) -> None:
        index = index if is_view else index.reshape(sides)
        accumulate(out, index, values.contiguous(), None, layout, planned, include=include)

    return add


def _divide(shape: Sequence[int], axis: int) -> tuple[int, int, int]:
    """Return the elements before a dimension, along it, and after it."""
    return prod(shape[:axis]), shape[axis], prod(shape[axis + 1 :])


def update_rows(
    target: Tensor, keys: Tensor, values: Tensor, reduce: str, *, include_self: bool = True
) -> None:
    """Change the rows of a tensor that keys name.

    Time and memory grow with the number of values, not with the size of the target.

    Args:
        target: Of shape ``[count, *rest]``, with any strides.
        keys: Rows, of shape ``[m]``.
        values: Of shape ``[m, *rest]``.
        reduce: A key of ``_RULES``.
        include_self: Whether what is in the target is a term or factor as well.
    """
    if not values.numel():
        return
    rule = _RULES[reduce]
    if reduce == "sum" and target.is_complex():
        target, values = (torch.view_as_real(part.resolve_conj()) for part in (target, values))
    if not _gets_few(target, values):
        whole = target.contiguous()
        rule(whole, keys, values, include_self)
        if whole is not target:
            target.copy_(whole)
        return
    ordered = torch.sort(keys, stable=True).values
    slots = torch.searchsorted(ordered, keys)  # the first place of an equal key
    rows = target.index_select(0, ordered)
    rule(rows, slots, values, include_self)
    # Values for one place are equal, so the order of the writes has no effect.
    target.index_put_((keys,), rows.index_select(0, slots))


def _gets_few(target: Tensor, values: Tensor) -> bool:
    """Return whether the values are so few that only their places should be read and written."""
    return target.numel() > _MANY * values.numel()


def find_last(keys: Tensor, count: int) -> Tensor:
    """Return the position of the last key of each row that equals each of ``0 .. count - 1``.

    Args:
        keys: Of shape ``[..., m]``.
        count: Number of keys.

    Returns:
        Positions of shape ``[..., count]``; -1 where there is none.
    """
    ranks = torch.arange(keys.shape[-1], device=keys.device).expand_as(keys)
    # The greatest of some integers does not depend on their order.
    return ranks.new_full((*keys.shape[:-1], count), -1).scatter_reduce_(-1, keys, ranks, "amax")


def _add(rows: Tensor, keys: Tensor, values: Tensor, include_self: bool) -> None:
    if rows.is_floating_point():
        add_rows(rows, keys, values, include=include_self)
    else:
        rows.index_put_((keys,), values, accumulate=True)  # integers are added exactly


def _replace(rows: Tensor, keys: Tensor, values: Tensor, _include_self: bool) -> None:
    """Write the last value of each place."""
    last = find_last(keys.to(torch.int64), len(rows)).index_select(0, keys)
    rows.index_put_((keys,), values.index_select(0, last))


def _multiply(rows: Tensor, keys: Tensor, values: Tensor, include_self: bool) -> None:
    """Multiply the values of each place, from first to last."""
    ordered, order = torch.sort(keys, stable=True)
    factors = values.index_select(0, order).to(accumulation_dtype(rows.dtype))
    bounds = torch.arange(len(rows) + 1, dtype=ordered.dtype, device=rows.device)
    offsets = torch.searchsorted(ordered, bounds)
    wide = (-1, *[1] * (rows.dim() - 1))
    if include_self:
        first = torch.cat([torch.ones_like(ordered[:1]), ordered.diff()]) != 0
        own = rows.index_select(0, ordered).to(factors.dtype)
        factors = torch.where(first.view(wide), own * factors, factors)
    occupied = (offsets[1:] > offsets[:-1]).view(wide)
    if rows.is_floating_point():
        # unsafe: the offsets are known to be valid; checking them would wait for the device.
        # Of rows, one thread multiplies each feature of a run.
        flat = factors.reshape(len(factors), -1)
        found = torch.segment_reduce(flat, "prod", offsets=offsets, initial=1, unsafe=True)
        products = found.view(rows.shape)
    else:
        products = _multiply_runs(factors, ordered.view(wide), (offsets[1:] - 1).clamp(min=0))
    rows.copy_(torch.where(occupied, products.to(rows.dtype), rows))


def _multiply_runs(factors: Tensor, runs: Tensor, last: Tensor) -> Tensor:
    """Return the product of each run of equal keys, whose last positions are given.

    torch.segment_reduce takes floating point only. Integers may be multiplied in any order: after
    step k of this loop each element holds the product of 2**k elements of its run.
    """
    step = 1
    while step < len(factors):
        same = runs[step:] == runs[:-step]
        folded = torch.where(same, factors[step:] * factors[:-step], factors[step:])
        factors = torch.cat([factors[:step], folded])
        step *= 2
    return factors.index_select(0, last)


def _average(rows: Tensor, keys: Tensor, values: Tensor, include_self: bool) -> None:
    """Write the sum of the terms, divided by their number."""
    dtype = accumulation_dtype(rows.dtype)
    counts = torch.zeros(len(rows), dtype=torch.int64, device=rows.device)
    counts.index_add_(0, keys, torch.ones_like(keys, dtype=torch.int64))
    divisors = counts.view(-1, *[1] * (rows.dim() - 1))
    total = rows.to(dtype, copy=True) if include_self else rows.new_zeros(rows.shape, dtype=dtype)
    _add(total, keys, values, include_self)
    terms = (divisors + include_self).clamp(min=1).to(dtype)
    rounding = None if rows.is_floating_point() else "floor"
    mean = torch.div(total, terms, rounding_mode=rounding)
    rows.copy_(torch.where(divisors > 0, mean.to(rows.dtype), rows))


def _choose(rows: Tensor, keys: Tensor, values: Tensor, include_self: bool, *, reduce: str) -> None:
    """Write the greatest or the least value; a zero is 0.0, and of NaNs there is one.

    Without -0.0 the order of equal numbers cannot show. A place keeps its bits if its number stays.
    """
    keys, chosen, is_float = keys.to(torch.int64), rows + 0, rows.is_floating_point()
    if not include_self:
        limits = (-torch.inf, torch.inf)
        if not is_float:
            limits = (torch.iinfo(rows.dtype).min, torch.iinfo(rows.dtype).max)
        chosen.index_fill_(0, keys, limits[reduce == "amin"])
    index = keys.view(-1, *[1] * (rows.dim() - 1)).expand_as(values)
    chosen.scatter_reduce_(0, index, values + 0, reduce)
    is_nan = chosen.isnan()
    kept = (chosen == rows) | (is_nan & rows.isnan())
    if is_float:
        chosen = torch.where(is_nan, torch.nan, chosen)
    rows.copy_(torch.where(kept, rows, chosen))


_RULES: dict[str, Callable[[Tensor, Tensor, Tensor, bool], None]] = {
    "sum": _add,
    "prod": _multiply,
    "mean": _average,
    "amax": partial(_choose, reduce="amax"),
    "amin": partial(_choose, reduce="amin"),
    "last": _replace,
}
