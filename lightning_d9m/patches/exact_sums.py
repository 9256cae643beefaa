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

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import product
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_d9m.patches.triton.launch import run_kernel

GUARD = 40
"""Bits below the last place of the greatest term that are added, at least."""

_FRACTION, _BIAS = 52, 1023  # of float64
_LARGE, _DOWN = _BIAS + 900, 64  # the exponent from which terms are scaled by 2**-_DOWN
_SLICE = 2**22  # terms that are cut at a time
_MAGNITUDE = 2**63 - 1  # all bits of a number but its sign

_FORMATS = {  # bits of the significand, and the exponent of the least normal number
    torch.float16: (11, -14),
    torch.bfloat16: (8, -126),
    torch.float32: (24, -126),
}


class Part(NamedTuple):
    """Terms of sums.

    Attributes:
        places: The places in its group that each row of values goes to, as integers of a shape that
            expands to ``[taps, batch, rows, inner]``. A place outside is skipped.
        values: Contiguous, of shape ``[batch, group, rows, inner]``; float64 only if the sums are.
        weights: Factors, with the strides of the places, or None.
    """

    places: Tensor
    values: Tensor
    weights: Tensor | None = None


class Pieces(NamedTuple):
    """The number of pieces of a term, and of terms.

    Attributes:
        number: Pieces of a term.
        size: The sum has at most ``2**size`` terms.
    """

    number: int
    size: int


class Cuts(NamedTuple):
    """The numbers that cut the terms of sums; see :func:`find_cuts`.

    Attributes:
        constants: For each piece the numbers whose addition and subtraction round a term.
        scale: Factors of the terms, or None where no term can be too large.
    """

    constants: tuple[Tensor, ...]
    scale: Tensor | None

    def at(self, places: Tensor) -> "Cuts":
        """Return those of the sum that each term goes to."""
        constants = tuple(part.gather(0, places) for part in self.constants)
        scale = None if self.scale is None else self.scale.gather(0, places)
        return Cuts(constants, scale)


Terms = Callable[[], Iterable[tuple[Tensor, Tensor]]]
"""The place of each term, and the terms in float64."""


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
    cuts = find_cuts(tops, plan_pieces(values.dtype, count), values.dtype)
    sums = [piece.sum(dims, keepdim=True) for piece in cut_terms(terms, cuts)]
    result = round_sums(sums, tops, dtype)
    return (
        result if keepdim else result.view([n for i, n in enumerate(values.shape) if i not in dims])
    )


def add_at(
    out: Tensor, places: Tensor, values: Tensor, *, include: bool = True, guard: int = GUARD
) -> None:
    """Add values to the places of a flattened tensor, rounded once; see :func:`accumulate`.

    Args:
        out: Floating point, contiguous.
        places: The position of each value, of shape ``[m]``; one outside is skipped.
        values: Of shape ``[m]``.
        include: Whether what is in ``out`` is a term as well.
        guard: See :func:`plan_pieces`.
    """
    part = Part(places.view(1, 1, -1, 1), values.reshape(1, 1, -1, 1))
    pieces = plan_pieces(out.dtype, places.numel() + 1, guard)
    accumulate(out.view(1, 1, -1, 1), part, pieces, include=include)


def accumulate(out: Tensor, part: Part, pieces: Pieces, *, include: bool = True) -> None:
    """Write into each place the sum of the terms that go to it.

    Args:
        out: Floating point, contiguous, of shape ``[batch, group, count, inner]``.
        part: The terms.
        pieces: Those of as many terms as a place can get, with its own.
        include: Whether what is in ``out`` is a term as well. A place without a value then keeps
            its bits; else it becomes 0.
    """
    if out.numel():
        form = _FORMATS.get(out.dtype, (0, 0))
        more = (part, pieces, form, include)
        run_kernel("sums:accumulate", _accumulate, _make_example, out, *more)


def _accumulate(
    out: Tensor, part: Part, pieces: Pieces, _form: tuple[int, int], include: bool
) -> None:
    slots, flat = out.numel(), out.view(-1)
    # What goes to no place goes to the row after the last one.
    size = slots + out.shape[-1]
    terms: Terms = partial(_list_terms, out, part, include)
    if len(part.places) * part.values.numel() <= _SLICE:
        terms = partial(iter, list(terms()))
    # As integers, the magnitudes of numbers are in the order of the numbers.
    tops = torch.zeros(size, dtype=torch.int64, device=out.device)
    for places, values in terms():
        tops.scatter_reduce_(0, places, values.view(torch.int64) & _MAGNITUDE, "amax")
    tops = tops >> _FRACTION
    cuts = find_cuts(tops, pieces, out.dtype)
    # Any number can be added to -0.0. A fresh sum of torch begins with 0.0.
    start = torch.full_like(tops, -0.0 if include else 0.0, dtype=torch.float64)
    sums = [start.clone() for _ in cuts.constants]
    for places, values in terms():
        for total, piece in zip(sums, cut_terms(values, cuts.at(places)), strict=True):
            total.index_add_(0, places, piece)
    result = round_sums(sums, tops, out.dtype)[:slots]
    flat.copy_(torch.where(flat.isnan(), flat, result) if include else result)


def _make_example(device: torch.device) -> tuple[Any, ...]:
    """Return arguments of :func:`_accumulate`: terms over 200 binary orders, in two pieces."""
    terms = torch.arange(1, 601, dtype=torch.float32, device="cpu")
    values = (terms * 0.37).sin() * (terms * 29 % 200 - 100).exp2()
    index = (terms.to(torch.int64) * 7 % 12).view(1, -1, 1)
    places = torch.stack([index[:, :300], index[:, 300:]])
    part = Part(places.to(device), values.view(1, 2, 300, 1).to(device))
    out = torch.ones(1, 2, 11, 1, device=device)
    return out, part, plan_pieces(out.dtype, 2**10), _FORMATS[out.dtype], True


def _list_terms(out: Tensor, part: Part, include: bool) -> Iterator[tuple[Tensor, Tensor]]:
    """Return the places and the terms, in slices."""
    if include:
        yield torch.arange(out.numel(), device=out.device), out.view(-1).to(torch.float64)
    *shape, count, inner = out.shape
    lines = torch.arange(shape[0] * shape[1], device=out.device).view(*shape, 1, 1) * count
    column = torch.arange(inner, device=out.device)
    batch, group, rows, _ = part.values.shape
    some = max(1, _SLICE // (group * inner))
    several = max(1, some // max(rows, 1))
    for tap in range(len(part.places)):
        index = part.places[tap].expand(batch, -1, -1)
        weights = None if part.weights is None else part.weights[tap].expand(batch, -1, -1)
        for begin, start in product(range(0, batch, several), range(0, rows, some)):
            side = slice(begin, begin + several), slice(start, start + some)
            keys, terms = index[side].unsqueeze(1), part.values[side[0], :, side[1]]
            if weights is not None:
                weight = weights[side].unsqueeze(1)
                terms = terms.to(weight.dtype) * weight
            places = lines[side[0]] + keys
            places = torch.where((keys >= 0) & (keys < count), places, lines.numel() * count)
            if inner > 1:
                places = places * inner + column
            yield places.expand(terms.shape).flatten(), terms.flatten().to(torch.float64)


def read_exponents(values: Tensor) -> Tensor:
    """Return the biased exponents of float64 numbers, int32."""
    return ((values.view(torch.int64) >> _FRACTION) & 0x7FF).to(torch.int32)


def find_cuts(tops: Tensor, pieces: Pieces, dtype: torch.dtype) -> Cuts:
    """Return what cuts terms into pieces whose sums float64 holds exactly.

    Args:
        tops: The greatest of :func:`read_exponents` of the terms of each sum.
        pieces: Their number, which depends on the number of terms.
        dtype: That of the terms before they were float64.
    """
    tops = tops.to(torch.int64).clamp(max=2 * _BIAS)
    large = tops >= _LARGE
    # The last place of a piece is 2**(last - _BIAS).
    last = torch.where(large, tops - _DOWN, tops).clamp(min=1) + (pieces.size - _FRACTION)
    step = _FRACTION + 2 - pieces.size
    constants = tuple(_find_constant(last - step * turn) for turn in range(pieces.number))
    if dtype != torch.float64:
        return Cuts(constants, None)  # only what is not finite is large
    return Cuts(constants, torch.where(large, 2.0**-_DOWN, 1.0).to(torch.float64))


def cut_terms(terms: Tensor, cuts: Cuts) -> list[Tensor]:
    """Cut float64 terms into pieces: the greatest one of each term, then the next one.

    The first piece of a zero, an infinity and a NaN is the term; the others do not count then.
    """
    rest = terms if cuts.scale is None else terms * cuts.scale
    cut: list[Tensor] = []
    for constant in cuts.constants:
        piece = (rest + constant).sub_(constant)
        if not cut:
            piece = torch.where(rest == 0, rest, piece)
        cut.append(piece)
        if len(cut) < len(cuts.constants):
            rest = rest - piece
    return cut


def round_sums(sums: Sequence[Tensor], tops: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sum of the sums of pieces, rounded once to a dtype.

    Args:
        sums: The sum of the greatest pieces, then that of the next ones; float64.
        tops: As for :func:`find_cuts`.
        dtype: The result's.
    """
    first, total, errors = sums[0], sums[-1], []
    for more in sums[-2::-1]:
        total, error = _add(more, total)
        errors.append(error)
    result = total
    if errors:
        tail = errors[0]
        for error in errors[1:]:
            tail = _add_to_odd(error, tail)
        result = total + tail if dtype == torch.float64 else _add_to_odd(total, tail)
        # The sign of a zero is that of the first sum.
        result = torch.where(
            (total == 0) & (tail == 0), torch.where(first == 0, first, 0.0), result
        )
    if dtype == torch.float64:
        result = torch.where(tops >= _LARGE, result * 2.0**_DOWN, result)
    elif dtype != torch.float32:  # to which float64 is rounded once
        bits, least = _FORMATS[dtype]
        last = read_exponents(result).to(torch.int64).clamp(min=least + _BIAS) - (bits - 1)
        constant = _find_constant(last)
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
