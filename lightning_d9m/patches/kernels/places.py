"""Places of a tensor that keys name, and their update by a rule; see ``exact_sums``.

A rule takes rows, the key of each value and the values, and changes the rows that get a value. The
result is the same in any order of the values, except that products and the last value follow the
order in which the values are given.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod

import torch
from torch import Tensor

from lightning_d9m.patches.arguments import accumulation_dtype
from lightning_d9m.patches.exact_sums import Part, accumulate, plan_pieces
from lightning_d9m.patches.triton.launch import allocate

_MANY = 2  # outputs for each value, beyond which only those that get a value are read


@dataclass(frozen=True)
class Update:
    """The result of a replacement that writes into a tensor.

    Attributes:
        write: Writes into the tensor: ``self`` of an in-place op, else a copy of it.
    """

    write: Callable[[Tensor], object]


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
    if not gets_few(target, values):
        whole = target.contiguous()
        rule(whole.view(prod(sizes), *target.shape[len(sizes) :]), keys, values, include_self)
        if whole is not target:
            target.copy_(whole)
        return
    ordered = torch.sort(keys, stable=True).values
    slots = torch.searchsorted(ordered, keys)  # the first place of an equal key
    rows = target[unravel(ordered, sizes)].contiguous()  # it has the strides of the target
    rule(rows, slots, values, include_self)
    # Values for one place are equal, so the order of the writes has no effect.
    target.index_put_(unravel(keys, sizes), rows.index_select(0, slots))


def gets_few(target: Tensor, values: Tensor) -> bool:
    """Return whether the values are so few that only their places should be read and written."""
    return target.numel() > _MANY * values.numel()


def unravel(places: Tensor, shape: Sequence[int]) -> tuple[Tensor, ...]:
    """Turn positions in a flattened tensor into one index for each of its dimensions."""
    indices: list[Tensor] = []
    for size in reversed(shape[1:]):
        indices.append(places % size)
        places = places // size
    return (places, *reversed(indices))


def add_to_sums(out: Tensor, index: Tensor, values: Tensor, *, include: bool) -> None:
    """Write into each place the sum of the values that go to it.

    Args:
        out: Floating point, contiguous, of shape ``[outer, count, inner]``.
        index: Of shape ``[m]``, or of the values' shape. What is outside ``0 .. count - 1`` is
            skipped.
        values: Of shape ``[outer, m, inner]``; float64 only if ``out`` is.
        include: Whether what is in ``out`` is a term as well. A place without a value then keeps
            its bits; else it becomes 0.
    """
    places = index.view(1, -1, 1) if index.dim() == 1 else index
    part = Part(places.unsqueeze(0), values.contiguous().unsqueeze(1))
    pieces = plan_pieces(out.dtype, values.shape[1] + 1)
    accumulate(out.unsqueeze(1), part, pieces, include=include)


def sum_by_index(index: Tensor, values: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """Return the sums of shape ``[outer, count, inner]``; see :func:`add_to_sums`."""
    outer, _, inner = values.shape
    out = allocate((outer, count, inner), dtype, values.device)
    add_to_sums(out, index, values, include=False)
    return out


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
        sums, terms = rows.view(1, rows.shape[0], -1), values.reshape(1, keys.shape[0], -1)
        add_to_sums(sums, keys, terms, include=include_self)
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
    divisors = _count_terms(rows, keys)
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


def _count_terms(rows: Tensor, keys: Tensor) -> Tensor:
    """Return how many values each row gets, of shape ``[count, 1, ...]``."""
    terms = torch.zeros(len(rows), dtype=torch.int64, device=rows.device)
    terms.index_add_(0, keys, torch.ones_like(keys, dtype=torch.int64))
    return terms.view(-1, *[1] * (rows.dim() - 1))
