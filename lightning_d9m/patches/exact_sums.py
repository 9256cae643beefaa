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

from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

GUARD = 40
"""Bits below the last place of the greatest term that are added, at least."""

Slices = Callable[[], Iterable[tuple[Tensor, Tensor]]]
"""Returns the places and the values of terms, in parts; it is called twice."""

_FRACTION, _BIAS = 52, 1023  # of float64
_LARGE, _DOWN = _BIAS + 900, 64  # the exponent from which terms are scaled by 2**-_DOWN
_SLICE = 2**22  # terms that are cut at a time

_FORMATS = {  # bits of the significand, and the exponent of the least normal number
    torch.float16: (11, -14),
    torch.bfloat16: (8, -126),
    torch.float32: (24, -126),
}


class Pieces(NamedTuple):
    """How the terms of a sum are cut.

    Attributes:
        number: Pieces of a term.
        size: The sum has at most ``2**size`` terms.
    """

    number: int
    size: int


def plan_pieces(dtype: torch.dtype, terms: int, guard: int = GUARD) -> Pieces:
    """Return the pieces for sums of at most so many terms of a dtype.

    ``guard`` bits below the last place of the greatest term are kept, or more.
    """
    size = max((terms - 1).bit_length(), 2)
    kept = (52 if dtype == torch.float64 else 23) + guard
    first, more = _FRACTION - size, _FRACTION + 2 - size
    return Pieces(1 + max(0, -((first - kept) // more)), size)


def exact_sum(
    values: Tensor,
    dims: Sequence[int] | None = None,
    *,
    keepdim: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return the sum over dimensions, rounded once; the same bits in any order.

    Args:
        values: Floating point or complex.
        dims: The dimensions; None stands for all.
        keepdim: Whether they stay, with the size 1.
        dtype: The result's, by default that of the values.
    """
    dtype = dtype or values.dtype
    dims = sorted({dim % values.dim() for dim in (range(values.dim()) if dims is None else dims)})
    if values.is_complex():
        parts = torch.view_as_real(values.resolve_conj())
        real = exact_sum(parts, dims, keepdim=keepdim, dtype=dtype.to_real())
        return torch.view_as_complex(real.contiguous())
    count = prod(values.shape[dim] for dim in dims)
    if not dims or not count:
        return (
            values.sum(dims, keepdim=keepdim, dtype=dtype) if dims else values.to(dtype, copy=True)
        )
    terms = values.to(torch.float64)
    tops = read_exponents(terms).amax(dims, keepdim=True)
    pieces = plan_pieces(values.dtype, count)
    sums = [piece.sum(dims, keepdim=True) for piece in cut_terms(terms, tops, pieces)]
    result = round_sums(sums, tops, dtype)
    return (
        result if keepdim else result.view([n for i, n in enumerate(values.shape) if i not in dims])
    )


def add_at(
    out: Tensor, places: Tensor, values: Tensor, *, include: bool = True, guard: int = GUARD
) -> None:
    """Write into each place the sum of the values that go to it, rounded once.

    Args:
        out: Floating point, contiguous.
        places: The position of each value in the flattened ``out``, int64 of shape ``[m]``. A value
            whose place is outside is skipped.
        values: Of shape ``[m]``; float64 only if ``out`` is.
        include: Whether what is in ``out`` is a term as well. A place without a value then keeps
            its bits; else it becomes 0.
        guard: See :func:`plan_pieces`.
    """

    def cut() -> Iterable[tuple[Tensor, Tensor]]:
        return zip(places.split(_SLICE), values.split(_SLICE), strict=True)

    add_slices_at(out, cut, plan_pieces(out.dtype, places.numel() + 1, guard), include=include)


def add_slices_at(out: Tensor, slices: Slices, pieces: Pieces, *, include: bool = True) -> None:
    """Do as :func:`add_at` with values in slices, none of which has to exist for long."""
    slots, flat = out.numel(), out.view(-1)
    own = flat.to(torch.float64)
    # What goes to no place goes to one more.
    tops = torch.zeros(slots + 1, dtype=torch.int32, device=out.device)
    if include:
        tops[:slots] = read_exponents(own)
    for places, values in slices():
        exponents = read_exponents(values.to(torch.float64))
        tops.scatter_reduce_(0, _bound(places, slots), exponents, "amax")
    # The sum of no terms, to which any number can be added: -0.0, or what torch begins with.
    start = -0.0 if include else 0.0
    shape = (pieces.number, slots + 1)
    sums = torch.full(shape, start, dtype=torch.float64, device=out.device)
    for places, values in slices():
        index = _bound(places, slots)
        cut = cut_terms(values.to(torch.float64), tops.index_select(0, index), pieces)
        for total, piece in zip(sums, cut, strict=True):
            total.index_add_(0, index, piece)
    sums, tops = sums[:, :slots], tops[:slots]
    if include:
        sums = sums + torch.stack(cut_terms(own, tops, pieces))
    result = round_sums(list(sums), tops, out.dtype)
    flat.copy_(torch.where(flat.isnan(), flat, result) if include else result)


def read_exponents(values: Tensor) -> Tensor:
    """Return the biased exponents of float64 numbers, int32."""
    return ((values.view(torch.int64) >> _FRACTION) & 0x7FF).to(torch.int32)


def cut_terms(terms: Tensor, tops: Tensor, pieces: Pieces) -> list[Tensor]:
    """Cut terms into pieces whose sums float64 holds exactly.

    Args:
        terms: float64.
        tops: The greatest of :func:`read_exponents` of the sum that each term belongs to; of a
            shape that expands to that of the terms.
        pieces: Their number, which depends on the number of terms.

    Returns:
        The greatest piece of each term, then the next one.
    """
    terms = torch.where(tops >= _LARGE, terms * 2.0**-_DOWN, terms)
    # The last place of a piece is 2**(last - _BIAS).
    last = _scale_down(tops).clamp(min=1) + (pieces.size - _FRACTION)
    is_cut = terms.isfinite() & (terms != 0)  # else the first piece is the term
    cut, rest = [], terms
    for _ in range(pieces.number):
        piece = torch.where(is_cut, _round_to(rest, last), rest)
        cut.append(piece)
        rest = torch.where(is_cut, rest - piece, -0.0)
        last = last - (_FRACTION + 2 - pieces.size)
    return cut


def round_sums(sums: Sequence[Tensor], tops: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sum of the sums of pieces, rounded once to a dtype.

    Args:
        sums: The sum of the greatest pieces, then that of the next ones; float64.
        tops: As for :func:`cut_terms`.
        dtype: The result's.
    """
    first, total, errors = sums[0], sums[-1], []
    for more in sums[-2::-1]:
        total, error = _add(more, total)
        errors.append(error)
    tail = torch.zeros_like(first)
    for error in errors:
        tail = _add_to_odd(error, tail)
    result = total + tail if dtype == torch.float64 else _add_to_odd(total, tail)
    result = torch.where((total == 0) & (tail == 0), total, result)
    result = torch.where(tops >= _LARGE, result * 2.0**_DOWN, result)
    if dtype != torch.float64:
        bits, least = _FORMATS[dtype]
        last = read_exponents(result).to(torch.int64).clamp(min=least + _BIAS) - (bits - 1)
        result = torch.copysign(_round_to(result, last), result)
    # Of NaNs there is one.
    result = torch.where(first.isnan(), torch.nan, torch.where(first.isinf(), first, result))
    return result.to(dtype)


def _bound(places: Tensor, slots: int) -> Tensor:
    return torch.where((places >= 0) & (places < slots), places, slots)


def _scale_down(tops: Tensor) -> Tensor:
    tops = tops.to(torch.int64).clamp(max=2 * _BIAS)
    return torch.where(tops >= _LARGE, tops - _DOWN, tops)


def _round_to(values: Tensor, last: Tensor) -> Tensor:
    """Round float64 numbers to multiples of ``2**(last - _BIAS)``, by a constant."""
    exponents = (last + _FRACTION).clamp(min=1)  # the least one rounds nothing
    constant = ((exponents << _FRACTION) | (1 << (_FRACTION - 1))).view(torch.float64)
    return (values + constant) - constant


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
