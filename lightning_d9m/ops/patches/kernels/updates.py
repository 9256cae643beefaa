"""Ops in which an index names the places of values: ``index_add``, ``scatter``, max pooling.

torch's CUDA kernels start one thread for each value, which adds, multiplies or writes with no
regard to the other threads of its place. Here an op turns its arguments into keys and values, and
names the rule that combines the values of a place. The result is the same in any order of the
values, except that products and the last value follow the order in which the values are given.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from operator import le
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format

from lightning_d9m.ops.patches.exact_sums import Layout, Pieces, accumulate, plan_pieces
from lightning_d9m.ops.patches.registration import (
    Update,
    accumulation_dtype,
    has_torch,
    make_places,
    require,
)

_MANY = 2  # elements for each value, beyond which only those that get a value are read
_MUCH = 2**30  # bytes of memory for exact sums, beyond which torch's own kernel may need less
_MODE_MAX = 2
_INDEX_DTYPES = (torch.int32, torch.int64)
_GUARD = 24  # bits that a single piece keeps of the few windows of one input
# What is in a place before the values, if the tensor's own value is not a term.
_NEUTRAL = {"sum": 0.0, "mean": 0.0, "prod": 1.0, "amax": -torch.inf, "amin": torch.inf}
_NOTHING = Update(lambda *_, **__: None)


def _plan(
    self: Tensor,
    dim: int,
    index: Tensor,
    source: Tensor,
    reduce: str,
    *,
    names: Mapping[str, str],
    by_slice: bool = False,
    include_self: bool = True,
    **_: Any,
) -> Any:
    """Return an update along a dimension, whose index has a place for each element or slice.

    Integers and complex numbers are left to torch. ``names`` has a rule for each reduction.
    """
    if not self.is_floating_point():
        return NotImplemented
    require(reduce in names)
    reduce, axis = names[reduce], dim % max(self.dim(), 1)
    shape, size, wanted, given = _fit_shapes(self, dim, index, source, by_slice=by_slice)
    if not prod(wanted):
        return _NOTHING
    # A key of a slice moves a whole slice.
    keys = wanted[axis] if by_slice else prod(wanted)
    if reduce == "sum" and _takes_less_in_torch(self, size, wanted, wanted[axis], keys):
        return NotImplemented
    is_whole, is_scalar = size == shape and wanted == given, 0 in {self.dim(), index.dim()}
    places = make_places(self.device, *((shape[axis],) if by_slice else size))
    rule = "mean of values" if reduce == "mean" and not include_self else reduce
    change = _plan_change(self, size, index, wanted, rule, axis)

    def write(target: Tensor, _: int, index: Tensor, source: Tensor, *_r: str, **kw: Any) -> None:
        if (alpha := kw.get("alpha", 1)) != 1:  # of index_add
            source = source.to(accumulation_dtype(source.dtype)) * alpha
        if is_scalar:
            target, index, source = target.view(shape), index.view(-1), source.view(given)
        keys = index if index.dtype == torch.int64 else index.to(torch.int64)
        # Fails if a place is outside. On CUDA the host does not wait: it is a device-side
        # assertion, as in torch's own kernels, which surfaces as an error at a later call.
        places.gather(0 if by_slice else axis, keys)
        if not is_whole:
            target, source = target[tuple(map(slice, size))], source[tuple(map(slice, wanted))]
        if not include_self:
            fill = target.index_fill_ if by_slice else target.scatter_
            fill(axis, keys, _NEUTRAL[reduce])
        change(target, index, source)

    return Update(write)


def _fit_shapes(
    self: Tensor, dim: int, index: Tensor, source: Tensor, *, by_slice: bool
) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of the target, of its part that may change, of the values, of the source.

    An index of elements may be shorter than the source, and beside the dimension than the target.
    """
    dims = max(self.dim(), 1)
    # As in torch, an empty index of elements may have any type and shape.
    is_index = index.dtype in _INDEX_DTYPES or not (by_slice or index.numel())
    require(-dims <= dim < dims, is_index, source.dtype == self.dtype)
    axis = dim % dims
    shape, wanted, given = (tuple(part.shape) or (1,) for part in (self, index, source))
    if by_slice:
        wanted = (*shape[:axis], *wanted, *shape[axis + 1 :])
    size = (*wanted[:axis], shape[axis], *wanted[axis + 1 :])
    if by_slice:
        require(index.dim() <= 1, source.dim() == self.dim(), wanted == given)
    if by_slice or index.numel():
        require(
            len(shape) == len(wanted) == len(given),
            all(map(le, (*wanted, *size), (*given, *shape))),
        )
    return shape, size, wanted, given


def _takes_less_in_torch(
    self: Tensor, size: Sequence[int], wanted: Sequence[int], terms: int, keys: int
) -> bool:
    """Return whether exact sums need much memory, and torch's deterministic kernel less.

    Exact sums take 20 to 28 bytes for each element of the target, or of the values if these are
    fewer. torch numbers and sorts the keys, each of which it expands to the target's dimensions.
    """
    # One float64 for each piece, and the exponent in 32 bits.
    own = 8 * plan_pieces(self.dtype, terms + 1).number + 4
    needed = own * (prod(size) if prod(size) <= _MANY * prod(wanted) else prod(wanted))
    return has_torch() and needed > _MUCH and keys * 8 * (self.dim() + 6) < needed


_NAMES = {name: name for name in ("sum", "prod", "mean", "amax", "amin")}
index_add = partial(_plan, reduce="sum", names=_NAMES, by_slice=True)
index_reduce = partial(_plan, names={name: name for name in list(_NAMES)[1:]}, by_slice=True)
scatter = partial(_plan, names={"add": "sum", "multiply": "prod"})
scatter_add = partial(_plan, reduce="sum", names=_NAMES)
scatter_reduce = partial(_plan, names=_NAMES)


def _plan_change(
    self: Tensor, size: Sequence[int], index: Tensor, shape: Sequence[int], rule: str, axis: int = 0
) -> Callable[[Tensor, Tensor, Tensor], None]:
    """Return what changes the places of a dimension that an index names, by values.

    The tensor is taken for one of a size; ``rule`` is a key of ``_RULES``. See :func:`plan_sum`.
    """
    outer, rows, inner = sides = _divide(shape, axis)
    is_sum = rule == "sum" and self.is_floating_point() and prod(size) <= _MANY * prod(shape)
    add = plan_sum(self.dtype, size, index, shape, axis) if is_sum else None

    def change(target: Tensor, index: Tensor, values: Tensor) -> None:
        # A view of the target, or a copy that is written back.
        whole = target.contiguous()
        if add:
            add(whole, index, values)
        elif outer == 1 and index.dim() == 1:
            keys = index.remainder(size[axis])
            update_rows(whole.view(-1, inner), keys, values.reshape(rows, inner), rule)
        else:
            keys = _number_places(_view_places(index, sides), size[axis])
            update_rows(whole.view(-1), keys, values.flatten(), rule)
        if whole is not target:
            target.copy_(whole)

    return change


def _view_places(index: Tensor, sides: Sequence[int]) -> Tensor:
    """Return an index of a dimension, or of the values' shape, as one of their three sides."""
    return index.view(1, -1, 1).expand(sides) if index.dim() == 1 else index.reshape(sides)


def _number_places(index: Tensor, count: int) -> Tensor:
    """Return positions in a flat tensor of an index of shape ``[outer, rows, inner]``."""
    outer, _, inner = index.shape
    lines = torch.arange(outer, device=index.device).view(-1, 1, 1) * count
    return ((lines + index) * inner + torch.arange(inner, device=index.device)).flatten()


def index_put_impl(
    self: Tensor,
    indices: Sequence[Tensor | None],
    values: Tensor,
    accumulate: bool = False,
    unsafe: bool = False,  # noqa: ARG001 - torch's argument
) -> Any:
    """Add the values where the indices of the first dimensions say."""
    if not (accumulate and self.is_floating_point()):
        return NotImplemented
    given = [index for index in indices if index is not None]
    require(
        0 < len(given) == len(indices) <= self.dim(),
        all(index.dtype in _INDEX_DTYPES for index in given),
        values.dtype == self.dtype,
        self.numel() > 0,
    )
    sizes, rest = self.shape[: len(given)], self.shape[len(given) :]
    shape = (*torch.broadcast_shapes(*[index.shape for index in given]), *rest)
    require(values.expand(shape).numel() > 0)
    keys = prod(shape) // prod(rest)
    if _takes_less_in_torch(self, self.shape, shape, keys, keys):
        return NotImplemented
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
    # The index of several dimensions becomes one number for each row.
    places, rows = make_places(self.device, *sizes), (prod(shape) // prod(rest), *rest)
    is_laid_out = values.shape == rows
    keys = torch.empty(rows[0], device="meta")
    # Only the shape of the keys is known here: they are computed at each call.
    change = _plan_change(self, (prod(sizes), *rest), keys, rows, reduce)

    def write(target: Tensor, indices: Any, values: Tensor, *_more: bool) -> None:
        given: Sequence[Tensor] = [indices] if isinstance(indices, Tensor) else indices
        keys = given[0]
        if len(given) == 1 and keys.dtype == torch.int64:
            places.take(keys)  # fails as in _plan; a place may be counted from the end
        else:
            _ = places[tuple(given)]  # as above
            keys = torch.zeros_like(keys)
            for part, size in zip(torch.broadcast_tensors(*given), sizes, strict=True):
                keys = keys * size + part.remainder(size)
        if not is_laid_out:
            values = values.expand(shape).reshape(rows)
        change(target, (keys if keys.dim() == 1 else keys.flatten()).contiguous(), values)

    return Update(write)


def embedding_bag_dense_backward(  # noqa: PLR0913, PLR0917 - torch's arguments
    grad: Tensor,
    indices: Tensor,  # noqa: ARG001 - the rows in the bags
    offset2bag: Tensor,  # noqa: ARG001 - the bag of each entry
    bag_size: Tensor,
    maximum_indices: Tensor,
    num_weights: int,
    scale_grad_by_freq: bool,  # noqa: ARG001 - not of this mode
    mode: int,
    per_sample_weights: Tensor | None,  # noqa: ARG001 - as above
    padding_idx: int = -1,  # noqa: ARG001 - a row that the bags skip
) -> Any:
    """Return the gradient with respect to the table, of shape ``[num_weights, features]``.

    Only that of mode max varies. ``maximum_indices`` has the row of the maximum for each bag and
    feature, and ``bag_size`` the number of entries of each bag.
    """
    if mode != _MODE_MAX:
        return NotImplemented
    require(
        grad.dim() == 2,  # noqa: PLR2004 - a number of dimensions
        maximum_indices.shape == grad.shape,
        bag_size.shape == grad.shape[:1],
    )
    # An empty bag has no maximum.
    is_full = (bag_size > 0).unsqueeze(1) & (maximum_indices >= 0)  # -1 in a bag of padding
    index = torch.where(is_full, maximum_indices, num_weights)
    return sum_rows(index, grad, num_weights)


def _pool_backward(
    grad_output: Tensor, self: Tensor, *more: Any, dims: int, keeps_format: bool = False
) -> Callable[..., Tensor]:
    """Return what returns the gradient of a max pooling with respect to its input.

    The arguments between the input and the last one, the indices, are those of the pooling. An
    input has as many places in windows with different starts as a window has places.
    """
    *window, indices = more
    shape, given = self.shape, grad_output.shape
    _require_planes(grad_output, indices, dims)
    require(
        given[:-dims] == shape[:-dims],
        grad_output.dtype == self.dtype,
        0 not in (*shape[1:], *given[-dims:]),
    )
    planes, outputs, inputs = prod(shape[:-dims]), prod(given[-dims:]), prod(shape[-dims:])
    # Without a window any number of outputs may have read one input.
    pieces = plan_pieces(self.dtype, outputs)
    if window:
        kernel_size, *rest = window
        pooled = rest[0]  # of a fractional pooling
        # A fractional pooling has the size of its output as an argument; that of the others
        # follows.
        if len(rest) > 1:
            pooled = torch.max_pool3d(self.new_empty(shape, device="meta"), *window).shape[-dims:]
        require(list(pooled) == list(given[-dims:]))
        pieces = plan_pieces(self.dtype, prod(kernel_size) ** (dims // len(kernel_size)), _GUARD)
    sizes = ((planes, inputs), indices, (planes, outputs))
    add = plan_sum(self.dtype, *sizes, 1, include=False, pieces=pieces)
    memory_format = suggest_memory_format(self) if keeps_format else torch.contiguous_format

    def run(grad_output: Tensor, *more: Any) -> Tensor:
        result = grad_output.new_empty(shape)
        add(result, more[-1], grad_output)
        if memory_format != torch.contiguous_format:
            result = result.clone(memory_format=memory_format)
        return result

    return run


max_pool3d_with_indices_backward = partial(_pool_backward, dims=3, keeps_format=True)
adaptive_max_pool2d_backward = partial(_pool_backward, dims=2, keeps_format=True)
adaptive_max_pool3d_backward = fractional_max_pool3d_backward = partial(_pool_backward, dims=3)
fractional_max_pool2d_backward = partial(_pool_backward, dims=2)


def _require_planes(values: Tensor, indices: Tensor, dims: int) -> None:
    require(
        values.dim() in {dims + 1, dims + 2},
        values.is_floating_point(),
        indices.shape == values.shape,
        indices.dtype == torch.int64,
    )


def _unpool(
    self: Tensor, indices: Tensor, output_size: Sequence[int], *window: Sequence[int], dims: int
) -> Tensor:
    """Return zeros with each value at the position in its plane that its index names.

    The stride and padding of an unpooling in 3 dimensions are only checked.
    """
    _require_planes(self, indices, dims)
    require(all(len(sizes) == dims for sizes in (output_size, *window)), all(map(min, window[:1])))
    # torch decides about empty planes.
    require(0 not in self.shape[-dims - 1 :])
    planes, count = prod(self.shape[:-dims]), prod(output_size)
    make_places(self.device, count).gather(0, indices.flatten())  # fails if a place is outside
    result, sides = self.new_zeros(planes * count), (planes, prod(self.shape[-dims:]), 1)
    update_rows(result, _number_places(indices.reshape(sides), count), self.flatten(), "last")
    return result.view(*self.shape[:-dims], *output_size)


max_unpool2d = partial(_unpool, dims=2)
max_unpool3d = partial(_unpool, dims=3)


def bincount(self: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Any:
    """Add the weights of equal values.

    The host waits for the greatest value, which sizes the result, as in torch.
    """
    if weights is None or not self.numel():
        return NotImplemented  # integers are counted exactly in any order
    count = len(torch.bincount(self, minlength=minlength))
    require(weights.shape == self.shape)
    # torch returns float32 for float32, and float64 for every other dtype.
    terms = weights if weights.dtype == torch.float32 else weights.to(torch.float64)
    return sum_rows(self, terms, count)


def sum_rows(index: Tensor, values: Tensor, count: int) -> Tensor:
    """Return the sums of the values of each of ``count`` places; see :func:`plan_sum`."""
    out = values.new_empty((count, *values.shape[1:]))
    add_rows(out, index, values, include=False)
    return out


def add_rows(out: Tensor, index: Tensor, values: Tensor, *, include: bool) -> None:
    """Write into each row the sum of the values that go to it; see :func:`plan_sum`."""
    plan_sum(out.dtype, out.shape, index, values.shape, include=include)(out, index, values)


def plan_sum(
    dtype: torch.dtype,
    size: Sequence[int],
    index: Tensor,
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
        index: Of one dimension, or of the values' shape. A place may be counted from the end; one
            outside is skipped.
        shape: That of the values, which is that of the sums but for the dimension.
        axis: The dimension.
        include: Whether what is there is a term as well.
        pieces: By default those for all values of the dimension.
    """
    outer, rows, inner = sides = _divide(shape, axis)
    lines = _view_places(index, sides)
    is_view, (first, step, last) = lines.data_ptr() == index.data_ptr(), lines.stride()
    layout = Layout(1, outer, 1, rows, inner, size[axis], (0, first, step, last))
    planned = pieces or plan_pieces(dtype, rows + 1)

    def add(out: Tensor, index: Tensor, values: Tensor) -> None:
        index = index if is_view else index.reshape(sides)
        accumulate(out, index, values.contiguous(), None, layout, planned, include=include)

    return add


def _divide(shape: Sequence[int], axis: int) -> tuple[int, int, int]:
    """Return the elements before a dimension, along it, and after it."""
    return prod(shape[:axis]), shape[axis], prod(shape[axis + 1 :])


def update_rows(target: Tensor, keys: Tensor, values: Tensor, reduce: str) -> None:
    """Change the rows of a contiguous tensor that keys name, by a rule of ``_RULES``.

    Time and memory grow with the number of values, not with the size of the target. With
    ``values`` of shape ``[m, *rest]``, ``keys`` has the shape ``[m]`` and ``target`` the shape
    ``[count, *rest]``. What is in the target is a term or factor as well.
    """
    rule = _RULES[reduce]
    if target.numel() <= _MANY * values.numel():
        rule(target, keys, values)
        return
    # The rows that are named, each as often as it is: the first of equal ones is used.
    ordered = torch.sort(keys, stable=True).values
    slots = torch.searchsorted(ordered, keys)  # the first place of an equal key
    rows = target.index_select(0, ordered)
    rule(rows, slots, values)
    # Values for one place are equal, so the order of the writes has no effect.
    target.index_put_((keys,), rows.index_select(0, slots))


def _add(rows: Tensor, keys: Tensor, values: Tensor) -> None:
    if rows.is_floating_point():
        add_rows(rows, keys, values, include=True)
    else:
        rows.index_put_((keys,), values, accumulate=True)  # torch adds one by one after a sort


def _replace(rows: Tensor, keys: Tensor, values: Tensor) -> None:
    """Write the last value of each place."""
    keys, ranks = keys.to(torch.int64), torch.arange(len(keys), device=keys.device)
    # The greatest of some integers does not depend on their order.
    last = ranks.new_full((len(rows),), -1).scatter_reduce_(0, keys, ranks, "amax")
    rows.index_put_((keys,), values.index_select(0, last.index_select(0, keys)))


def _multiply(rows: Tensor, keys: Tensor, values: Tensor) -> None:
    """Multiply the values of each place, from first to last."""
    bounds = torch.arange(len(rows) + 1, dtype=keys.dtype, device=rows.device)
    ordered, order = torch.sort(torch.cat([bounds[:-1], keys]), stable=True)
    # Each row itself comes before its values, because the sort is stable.
    offsets = torch.searchsorted(ordered, bounds)
    factors = torch.cat([rows, values]).index_select(0, order).to(accumulation_dtype(rows.dtype))
    # unsafe: the offsets are known to be valid; checking them would wait for the device.
    # Of rows, one thread multiplies each feature of a run.
    flat = factors.reshape(len(factors), -1)
    products = torch.segment_reduce(flat, "prod", offsets=offsets, initial=1, unsafe=True)
    occupied = (offsets.diff() > 1).view(-1, *[1] * (rows.dim() - 1))
    rows.copy_(torch.where(occupied, products.view(rows.shape).to(rows.dtype), rows))


def _average(rows: Tensor, keys: Tensor, values: Tensor, *, own: int) -> None:
    """Write the sum of the terms, divided by their number, of which ``own`` are in the rows."""
    dtype = accumulation_dtype(rows.dtype)
    counts = torch.zeros(len(rows), dtype=torch.int64, device=rows.device)
    counts.index_add_(0, keys, torch.ones_like(keys, dtype=torch.int64))
    given, total = counts.view(-1, *[1] * (rows.dim() - 1)), rows.to(dtype, copy=True)
    _add(total, keys, values)
    mean = total / (given + own).clamp(min=1).to(dtype)
    rows.copy_(torch.where(given > 0, mean.to(rows.dtype), rows))


def _choose(rows: Tensor, keys: Tensor, values: Tensor, *, reduce: str) -> None:
    """Write the greatest or the least value; a zero is 0.0, and of NaNs there is one.

    Without -0.0 the order of equal numbers cannot show. A place keeps its bits if its number stays.
    """
    index = keys.to(torch.int64).view(-1, *[1] * (rows.dim() - 1)).expand_as(values)
    # Adding 0 turns -0.0 into 0.0, so that zeros are equal bits.
    chosen = (rows + 0).scatter_reduce_(0, index, values + 0, reduce)
    kept = (chosen == rows) | (chosen.isnan() & rows.isnan())
    rows.copy_(torch.where(kept, rows, torch.where(chosen.isnan(), torch.nan, chosen)))


_RULES: dict[str, Callable[..., None]] = {
    "sum": _add,
    "prod": _multiply,
    "mean": partial(_average, own=1),
    "mean of values": partial(_average, own=0),
    "amax": partial(_choose, reduce="amax"),
    "amin": partial(_choose, reduce="amin"),
    "last": _replace,
}
