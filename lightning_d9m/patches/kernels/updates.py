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

from lightning_d9m.patches.arguments import accumulation_dtype, require, require_places
from lightning_d9m.patches.exact_sums import Layout, Part, Pieces, accumulate, plan_pieces
from lightning_d9m.patches.triton.launch import allocate

Update = Callable[[Tensor], object]
"""Writes a result into a tensor: ``self`` of an in-place op, else a copy of it."""

_MANY = 2  # elements for each value, beyond which only those that get a value are read
_MODE_MAX = 2
_INDEX_DTYPES = (torch.int32, torch.int64)
_LEGACY = {"add": "sum", "multiply": "prod"}


def _write_nothing(_: Tensor) -> None: ...


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
    rows, slices, keys = _as_rows(self, dim), _as_rows(source, dim), index
    if not index.dim():
        keys = index.view(1)
    require(slices.shape[:1] == keys.shape, slices.shape[1:] == rows.shape[1:])
    if not source.numel():
        return _write_nothing
    sizes = rows.shape[:1]
    require_places(keys, sizes)

    is_sum = reduce == "sum" and self.is_floating_point() and self.dim() > 0

    def write(target: Tensor) -> None:
        if is_sum and target.is_contiguous() and not _gets_few(target, source):
            add_rows(target, keys, source, dim % dims, include=True)
            return
        rows = _as_rows(target, dim)
        update_places(rows, sizes, keys, slices, reduce, include_self=include_self)

    return write


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
    require(-dims <= dim < dims, index.dtype in _INDEX_DTYPES, src.dtype == self.dtype)
    if not index.numel():
        return _write_nothing
    if not (index.dim() and src.dim()):
        index, src = (part if part.dim() else part.view(1) for part in (index, src))
    shape, wanted, axis = self.shape or torch.Size([1]), index.shape, dim % dims
    around, above = ((*one[:axis], *one[axis + 1 :]) for one in (wanted, shape))
    require(len(shape) == len(wanted) == src.dim())
    if wanted != src.shape or around != above:
        require(all(map(le, wanted, src.shape)), all(map(le, around, above)))
        src = src[tuple(map(slice, wanted))]
    require_places(index, shape, axis)
    is_sum = reduce == "sum" and around == above and self.is_floating_point()

    def write(target: Tensor) -> None:
        target = target if target.dim() else target.view(shape)
        if is_sum and not _gets_few(target, src):
            whole = target.contiguous()
            add_rows(whole, index, src, axis, include=True)
            if whole is not target:
                target.copy_(whole)
            return
        flat = target.view(-1) if target.is_contiguous() else target
        places, more = _find_places(index, shape, axis), {"include_self": include_self}
        update_places(flat, flat.shape, places, src.flatten(), reduce, **more)

    return write


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
    first, *others = torch.broadcast_tensors(*given) if len(given) > 1 else given
    rows = values.expand((*first.shape, *rest))
    require(rows.numel() > 0)
    keys = _count_from_start(first.flatten(), sizes[0])
    for index, size in zip(others, sizes[1:], strict=True):
        keys = keys * size + _count_from_start(index.flatten(), size)
    rows = rows.reshape(len(keys), *rest)
    return lambda target: update_places(target, sizes, keys, rows, "sum")


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
        return _write_nothing
    places, values = _count_from_start(index.flatten(), size), source.flatten()
    shape = self.shape or torch.Size([1])
    reduce = "sum" if accumulate else "last"
    return lambda target: update_places(target.view(shape), shape, places, values, reduce)


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
    """Return the sums of the values of each of ``count`` places; see :func:`add_rows`."""
    out = allocate((count, *values.shape[1:]), values.dtype, values.device)
    add_rows(out, index, values, include=False)
    return out


def add_rows(
    out: Tensor,
    index: Tensor,
    values: Tensor,
    axis: int = 0,
    *,
    include: bool,
    pieces: Pieces | None = None,
) -> None:
    """Write into each place of a dimension the sum of the values that go to it.

    Args:
        out: Floating point, contiguous.
        index: Of one dimension, or of the values' shape. A place outside is skipped.
        values: Of the shape of ``out``, but for the dimension; float64 only if ``out`` is.
        axis: The dimension.
        include: Whether what is in ``out`` is a term as well.
        pieces: By default those for all values of the dimension.
    """
    shape = values.shape
    outer, rows, inner = prod(shape[:axis]), shape[axis], prod(shape[axis + 1 :])
    if index.dim() == 1:
        steps = (0, 0, index.stride(0), 0)
    else:
        index = index.reshape(outer, rows, inner)
        outer_step, row_step, inner_step = index.stride()
        steps = (0, outer_step, row_step, inner_step)
    layout = Layout(1, outer, 1, rows, inner, out.shape[axis], steps)
    part = Part(index, values.contiguous(), None, layout)
    accumulate(out, part, pieces or plan_pieces(out.dtype, rows + 1), include=include)


def update_places(
    target: Tensor,
    sizes: Sequence[int],
    keys: Tensor,
    values: Tensor,
    reduce: str,
    *,
    include_self: bool = True,
) -> None:
    """Change the places of a tensor that keys name.

    Time and memory grow with the number of values, not with the size of the target.

    Args:
        target: Of shape ``[*sizes, *rest]``, with any strides.
        sizes: The sizes of the dimensions that the keys go through.
        keys: Positions as if these dimensions were one; of shape ``[m]``.
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
        rows = whole if len(sizes) == 1 else whole.view(-1, *target.shape[len(sizes) :])
        rule(rows, keys, values, include_self)
        if whole is not target:
            target.copy_(whole)
        return
    ordered = torch.sort(keys, stable=True).values
    slots = torch.searchsorted(ordered, keys)  # the first place of an equal key
    rows = target[_unravel(ordered, sizes)].contiguous()  # it has the strides of the target
    rule(rows, slots, values, include_self)
    # Values for one place are equal, so the order of the writes has no effect.
    target.index_put_(_unravel(keys, sizes), rows.index_select(0, slots))


def _gets_few(target: Tensor, values: Tensor) -> bool:
    """Return whether the values are so few that only their places should be read and written."""
    return target.numel() > _MANY * values.numel()


def _unravel(places: Tensor, shape: Sequence[int]) -> tuple[Tensor, ...]:
    """Turn positions in a flattened tensor into one index for each of its dimensions."""
    indices: list[Tensor] = []
    for size in reversed(shape[1:]):
        indices.append(places % size)
        places = places // size
    return (places, *reversed(indices))


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
