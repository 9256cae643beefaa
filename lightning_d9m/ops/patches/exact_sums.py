"""Sums that do not depend on the order of their terms.

Each sum has an exponent, that of its greatest term. Each term is cut into pieces at bits that only
this exponent and the number of terms decide (Demmel and Nguyen 2013, Rump 2009): adding a constant
to a float64 number and subtracting it again rounds the number to a multiple of the constant's last
place. A piece has so few bits that float64 holds every sum of pieces exactly. Additions that never
round may come in any order, on any device, in torch's own reductions and atomics. The pieces' sums
are then added and rounded once, to nearest with ties to even.

What is below the last piece is rounded off each term. A sum is exact before it is rounded if its
terms span less than ``2**GUARD``; else the error before it is rounded is at most ``2**-GUARD``
units in the last place of the greatest term, for each term.

Infinities, NaN and -0.0 need no case of their own: a piece keeps them, and IEEE additions of them
give the same in any order, except the payload of a NaN, which the result does not keep.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_d9m.ops.patches.triton.launch import run_kernel

GUARD = 40
"""Bits below the last place of the greatest term that are added, at least."""

_FRACTION, _BIAS = 52, 1023  # of float64
# A cut adds a constant that is about 2**size times the greatest term, which must not overflow:
# terms of float64 near the end of the range are scaled first.
_LARGE, _DOWN = _BIAS + 900, 64  # the exponent from which terms are scaled by 2**-_DOWN
# Terms are float64 with a place of 64 bits, and are cut into several pieces: a slice bounds the
# memory.
_SLICE = 2**22  # terms that are cut at a time
_MAGNITUDE = 2**63 - 1  # all bits of a number but its sign

_FORMATS = {  # bits of the significand, and the exponent of the least normal number
    torch.float16: (11, -14),
    torch.bfloat16: (8, -126),
    torch.float32: (24, -126),
}


class Layout(NamedTuple):
    """The order in which terms and sums lie in memory.

    Attributes:
        taps: The number of places that each value goes to.
        batch: The values are of shape ``[batch, group, rows, inner]``, contiguous.
        group, rows, inner: As above.
        places: The sums are of shape ``[batch, group, places, inner]``, contiguous.
        steps: The strides of the keys by tap, batch, row and column; 0 along what shares one.
    """

    taps: int
    batch: int
    group: int
    rows: int
    inner: int
    places: int
    steps: tuple[int, int, int, int]


class Pieces(NamedTuple):
    """``number`` pieces of each term, for sums of at most ``2**size`` terms."""

    number: int
    size: int


@lru_cache(maxsize=4096)
def plan_pieces(dtype: torch.dtype, terms: int, guard: int = GUARD) -> Pieces:
    """Return the pieces for sums of at most so many terms of a dtype.

    ``guard`` bits below the last place of the greatest term are kept, or more.
    """
    # The more terms, the fewer bits has a piece: float64 must hold the sum of all first pieces, and
    # that of all second ones.
    size = max((terms - 1).bit_length(), 2)
    # The bits of the significand below its first one, in which sums are taken: float16 and bfloat16
    # are added as float32 is.
    kept = (52 if dtype == torch.float64 else 23) + guard
    first, more = _FRACTION - size, _FRACTION + 2 - size
    return Pieces(1 + max(0, -((first - kept) // more)), size)


def accumulate(
    out: Tensor,
    keys: Tensor,
    values: Tensor,
    weights: Tensor | None,
    layout: Layout,
    pieces: Pieces,
    *,
    include: bool = True,
) -> None:
    """Write into each place the sum of the terms that go to it: values, or values times weights.

    Args:
        out: Floating point, contiguous.
        keys: The place of each value, from 0 to ``places``, or counted from the end; a place
            outside is skipped.
        values: Floating point; float64 only if the sums are.
        weights: Factors, with the strides of the keys, or None.
        layout: How they lie in memory.
        pieces: Those of as many terms as a place can get, with its own.
        include: Whether what is in ``out`` is a term as well. A place without a value then keeps
            its bits; else it becomes 0.
    """
    if out.numel():
        more = (keys, values, weights, layout, pieces, _FORMATS.get(out.dtype, (0, 0)), include)
        run_kernel("kernels:accumulate", _accumulate, _make_example, out, *more)


def _accumulate(
    out: Tensor,
    keys: Tensor,
    values: Tensor,
    weights: Tensor | None,
    layout: Layout,
    pieces: Pieces,
    _form: tuple[int, int],
    include: bool,
) -> None:
    flat = out.view(-1)
    list_terms = partial(_list_terms, flat if include else None, keys, values, weights, layout)
    # The terms are read twice, for the exponents and for the sums: a small list of them is kept.
    if layout.taps * values.numel() <= _SLICE:
        list_terms = partial(iter, list(list_terms()))
    # What goes to no place goes to the row after the last one.
    # Integers, whose maximum does not depend on the order, in place of floats with NaNs.
    tops = flat.new_zeros(len(flat) + layout.inner, dtype=torch.int64)
    # As integers, the magnitudes of numbers are in the order of the numbers.
    for places, terms in list_terms():
        tops.scatter_reduce_(0, places, terms.view(torch.int64) & _MAGNITUDE, "amax")
    tops = tops >> _FRACTION
    cuts = find_cuts(tops, pieces, out.dtype)
    # Any number can be added to -0.0. A fresh sum of torch begins with 0.0.
    start = -0.0 if include else 0.0
    sums = [torch.full_like(tops, start, dtype=torch.float64) for _ in range(pieces.number)]
    for places, terms in list_terms():
        own = [part if part is None else part.gather(0, places) for part in cuts]
        # index_add_ uses atomics on CUDA: the sums are exact, so their order does not show.
        for total, piece in zip(sums, cut_terms(terms, own), strict=True):
            total.index_add_(0, places, piece)
    result = round_sums(sums, tops, out.dtype)[: len(flat)]
    # A NaN that was there keeps its bits.
    flat.copy_(torch.where(flat.isnan(), flat, result) if include else result)


def _make_example(device: torch.device) -> tuple[Any, ...]:
    """Return arguments of :func:`_accumulate`: terms over 200 binary orders, in two pieces."""
    terms = torch.arange(1, 601, dtype=torch.float32, device="cpu")
    # The binary orders need the second piece, without which a wrong kernel could pass.
    values = (terms * 0.37).sin() * (terms * 29 % 200 - 100).exp2()
    index = (terms.to(torch.int64) * 7 % 12).to(device)
    layout = Layout(2, 1, 2, 300, 1, 11, (300, 0, 1, 0))
    out = torch.ones(1, 2, 11, 1, device=device)
    more = (layout, plan_pieces(out.dtype, 2**10), _FORMATS[out.dtype], True)
    return out, index, values.to(device), None, *more


def _list_terms(
    own: Tensor | None, keys: Tensor, values: Tensor, weights: Tensor | None, layout: Layout
) -> Iterator[tuple[Tensor, Tensor]]:
    """Return the places and the terms, in slices; those of the sums themselves first."""
    if own is not None:
        for places in torch.arange(len(own), device=own.device).split(_SLICE):
            yield places, own[places].to(torch.float64)
    taps, batch, group, rows, inner, count, steps = layout
    indices, *factors = (
        one.as_strided((taps, batch, rows, inner), steps).unsqueeze(2)
        for one in (keys, weights)
        if one is not None
    )
    given = values.view(batch, group, rows, inner)
    lines = torch.arange(batch * group, device=keys.device).view(batch, group, 1, 1) * count
    beyond, column = batch * group * count, torch.arange(inner, device=keys.device)
    left, parts = _SLICE, list[list[slice]]()
    # Whole inner dimensions first, so that a slice is one piece of memory where it can be.
    for size in reversed(given.shape):
        parts.insert(0, [slice(start, start + left) for start in range(0, size, left)])
        left = max(1, left // max(size, 1))
    for tap, *where in product(range(taps), *parts):
        common = (where[0], slice(None), *where[2:])  # a group has one key for all
        key, terms = indices[tap][common], given[tuple(where)]
        for factor in factors:
            terms = terms.to(factor.dtype) * factor[tap][common]
        # Python counts from the end, and so do the ops that take indices.
        key = torch.where(key < 0, key + count, key)
        places = torch.where((key >= 0) & (key < count), lines[tuple(where[:2])] + key, beyond)
        places = places * inner + column[where[3]]
        yield places.expand(terms.shape).flatten(), terms.flatten().to(torch.float64)


def find_cuts(tops: Tensor, pieces: Pieces, dtype: torch.dtype) -> Sequence[Any]:
    """Return what cuts terms into pieces whose sums float64 holds exactly.

    Args:
        tops: The greatest biased exponent of the terms of each sum.
        pieces: Their number, which depends on the number of terms.
        dtype: That of the terms before they were float64.

    Returns:
        Factors of the terms, or None where no term can be too large, and for each piece the numbers
        whose addition and subtraction round a term.
    """
    tops = tops.to(torch.int64).clamp(max=2 * _BIAS)
    large = tops >= _LARGE
    # The last place of a piece is 2**(last - _BIAS).
    # Subnormal numbers have exponent 0, and the last place of exponent 1.
    last = torch.where(large, tops - _DOWN, tops).clamp(min=1) + (pieces.size - _FRACTION)
    step = _FRACTION + 2 - pieces.size
    constants = [_find_constant(last - step * turn) for turn in range(pieces.number)]
    if dtype != torch.float64:  # only what is not finite is large
        return None, *constants
    return torch.where(large, 2.0**-_DOWN, 1.0).to(torch.float64), *constants


def cut_terms(terms: Tensor, cuts: Sequence[Any]) -> list[Tensor]:
    """Cut float64 terms into pieces: the greatest one of each term, then the next one.

    The first piece of a zero, an infinity and a NaN is the term; the others do not count then.
    """
    scale, *constants = cuts
    rest, cut = terms if scale is None else terms * scale, list[Tensor]()
    for constant in constants:
        piece = (rest + constant).sub_(constant)
        if not cut:
            piece = torch.where(rest == 0, rest, piece)
        cut.append(piece)
        if len(cut) < len(constants):
            rest = rest - piece
    return cut


def round_sums(sums: Sequence[Tensor], tops: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sum of the sums of pieces, rounded once to a dtype.

    The sum of the greatest pieces comes first; all are float64. ``tops`` are those of the cuts.
    """
    first, total, errors = sums[0], sums[-1], []
    for more in sums[-2::-1]:
        total, error = _add(more, total)
        errors.append(error)
    result = total
    if errors:
        # A rounding to odd keeps whether anything lies below, so that the last rounding is the only
        # one that counts (Boldo and Melquiond 2008).
        tail = errors[0]
        for error in errors[1:]:
            tail = _add_to_odd(error, tail)
        result = total + tail if dtype == torch.float64 else _add_to_odd(total, tail)
        # The sign of a zero is that of the first sum.
        zero = torch.where(first == 0, first, 0.0)
        result = torch.where((total == 0) & (tail == 0), zero, result)
    if dtype == torch.float64:
        result = torch.where(tops >= _LARGE, result * 2.0**_DOWN, result)
    elif dtype != torch.float32:  # to which float64 is rounded once
        bits, least = _FORMATS[dtype]
        exponents = (result.view(torch.int64) >> _FRACTION) & 0x7FF
        constant = _find_constant(exponents.clamp(min=least + _BIAS) - (bits - 1))
        result = torch.copysign((result + constant) - constant, result)
    # Of NaNs there is one.
    result = torch.where(first.isfinite(), result, torch.where(first.isnan(), torch.nan, first))
    return result.to(dtype)


def _find_constant(last: Tensor) -> Tensor:
    """Return what rounds to multiples of ``2**(last - _BIAS)`` if it is added and subtracted."""
    exponents = (last + _FRACTION).clamp(min=1)  # the least one rounds nothing
    return ((exponents << _FRACTION) | (1 << (_FRACTION - 1))).view(torch.float64)


def _add(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rounded sum and its error, exactly (Knuth)."""
    total = left + right
    given = total - left
    return total, (left - (total - given)) + (right - given)


def _add_to_odd(left: Tensor, right: Tensor) -> Tensor:
    """Return a sum whose last bit is 1 unless it is exact, so that it can be rounded again."""
    total, error = _add(left, right)
    bits = total.view(torch.int64)
    nearer = torch.where((error > 0) == (bits >= 0), bits + 1, bits - 1)
    return torch.where((error != 0) & (bits & 1 == 0), nearer, bits).view(torch.float64)
