"""Sums and products of float32 numbers, rounded once from their exact values.

float64 holds every product of two float32 numbers. A sum of n such terms in float64, in any order
and by any library, is off by at most n * 2**-53 times the sum of their sizes. If all numbers within
twice this bound round to one float32 number, that number is the exact sum rounded, whatever the
order was. Otherwise (for about one element in 10,000) the terms of the element are added with more
bits, and, if this does not decide its last bit either, by ``math.fsum``.
Which elements need it may differ between machines; the results do not. Sums of float64 numbers are
those of ``patches.exact_sums``, and products of float64 numbers come from Ozaki's scheme.
"""

import math
import struct
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from lightning_d9m.patches.exact_sums import (
    cut_terms,
    find_cuts,
    plan_pieces,
    read_exponents,
    round_sums,
)

UNIT = 2.0**-53
BLOCK = 512
"""Terms that are added at a time: shorter sums have smaller bounds."""

_CHUNK = 2**15  # sums that are rounded at a time: they stay in a core's cache
_MOST_TERMS = 2**20  # that are added exactly at a time


Terms = Callable[[Tensor], Tensor]
"""What returns something for each of some sums, given their flat positions."""


def settle(
    total: Tensor, bound: Tensor, find_terms: Terms, have_terms: Terms | None = None
) -> Tensor:
    """Round float64 sums to float32 as their exact values round.

    Args:
        total: The sums, contiguous; any order of additions.
        bound: At least twice the greatest error of each sum, contiguous.
        find_terms: Returns the terms, ``[sums, terms]``.
        have_terms: Returns which sums have a term that is not 0, if that is fast.
    """
    flat, margins = total.view(-1), bound.view(-1)
    result, places = _round(flat, margins)
    if len(places):
        result[places] = flat[places].float()
        places = places[flat[places].isfinite()]
        places = places if have_terms is None else places[have_terms(places)]
        _add_unsure(result, places, find_terms)
    return result.add_(0.0).view(total.shape)  # one zero


def _round(total: Tensor, bound: Tensor) -> tuple[Tensor, Tensor]:
    """Return sums in float32, and the places of those that a bound of the error may change."""
    if total.device.type != "cpu":
        result = (total + bound).float()
        return result, ((total - bound).float() != result).nonzero().view(-1)
    result = torch.empty_like(total, dtype=torch.float32)
    sums, margins, highest = (one.numpy() for one in (total, bound, result))
    lowest = np.empty(min(len(sums), _CHUNK), dtype=np.float32)
    places = []
    with np.errstate(all="ignore"):  # NumPy adds and rounds in one pass
        for start in range(0, len(sums), _CHUNK):
            part = slice(start, start + _CHUNK)
            high, low = highest[part], lowest[: len(highest[part])]
            np.add(sums[part], margins[part], out=high, casting="same_kind")
            np.subtract(sums[part], margins[part], out=low, casting="same_kind")
            places.append(np.flatnonzero(high != low) + start)
    return result, torch.from_numpy(np.concatenate(places))


def _add_unsure(result: Tensor, places: Tensor, find_terms: Terms) -> None:
    """Write the sums of which the float64 sum did not decide the last bit."""
    if not len(places):
        return
    length = find_terms(places[:1]).shape[-1]
    for part in places.split(max(1, _MOST_TERMS // max(length, 1))):
        terms = find_terms(part)
        total, sure = _add_closely(terms)
        result[part] = total.float()
        rest = (~sure).nonzero().view(-1)
        sums = [add_exactly(row) for row in terms[rest].tolist()]
        result[part[rest]] = torch.tensor(sums, dtype=torch.float64, device=total.device).float()


def _add_closely(terms: Tensor) -> tuple[Tensor, Tensor]:
    """Return sums of rows, and which of them surely round to float32 as the exact sums do.

    The upper parts of the terms are multiples of one power of two, so that their sum is exact.
    """
    length = terms.shape[1]
    bits = length.bit_length() + 1
    top = terms.abs().amax(1, keepdim=True)
    top = (top.view(torch.int64) >> 52 << 52).view(torch.float64)
    constant = top * (1.5 * 2.0**bits)
    upper = (terms + constant).sub_(constant)
    total = upper.sum(1) + (terms - upper).sum(1)
    # The lower parts have errors of at most so much: a part of the last place of the sum.
    sure = top[:, 0] * (length**2 * 2.0 ** (bits - 105)) <= total.abs() * 2.0**-54
    infinite = torch.full_like(total, math.inf)
    above, below = (torch.nextafter(total, end).float() for end in (infinite, -infinite))
    return total, sure & (above == below)


def add_exactly(terms: list[float]) -> float:
    """Return a sum in float64 that rounds to float32 as the exact sum does.

    Its last bit is 1 unless it is exact (rounding to odd).
    """
    total = math.fsum(terms)
    terms.append(-total)
    rest = math.fsum(terms)
    if rest and not struct.unpack("<q", struct.pack("<d", total))[0] & 1:
        return math.nextafter(total, math.copysign(math.inf, rest))
    return total


def add_terms(
    values: Tensor, dims: Sequence[int] | None, *, keepdim: bool, dtype: torch.dtype
) -> Tensor:
    """Return the sum over dimensions, rounded once to a dtype (twice to one of 16 bits).

    The terms are float32 numbers, or float64 numbers below 2**512.
    """
    count = values.dim()
    axes = sorted({dim % count for dim in (dims or range(count))}) if count else []
    shape = [1 if axis in axes else size for axis, size in enumerate(values.shape)]
    if not keepdim:
        final = [size for axis, size in enumerate(values.shape) if axis not in axes]
    else:
        final = shape
    if not values.numel():
        return torch.zeros(final, dtype=dtype, device=values.device)
    if dtype == torch.float64:
        return exact_sum(values, axes).add_(0.0).view(final)
    terms = values.to(torch.float64)
    total, rounds = _reduce(terms, axes)
    size, _ = _reduce(terms.abs(), axes)
    others = [axis for axis in range(count) if axis not in axes]

    def find_terms(places: Tensor) -> Tensor:
        places = places.clone()
        index: list[Tensor] = []
        for axis in reversed(others):
            index.insert(0, places % values.shape[axis])
            places = places // values.shape[axis]
        rows = terms.permute(*others, *axes)[tuple(index)] if others else terms.unsqueeze(0)
        return rows.reshape(max(len(places), 1), -1)

    total = total.contiguous()
    result = settle(total, size * (2 * (rounds + 2) * UNIT), find_terms)
    return result.view(final).to(dtype)


def _reduce(terms: Tensor, axes: Sequence[int]) -> tuple[Tensor, int]:
    """Add over dimensions one after the other; return also the greatest number of roundings."""
    rounds = 0
    for axis in sorted(axes, key=lambda axis: -axis):
        length = terms.shape[axis]
        part = math.gcd(length, BLOCK)
        if length > 2 * BLOCK and part > 1:
            terms = terms.unflatten(axis, (length // part, part)).sum(axis + 1)
            rounds, length = rounds + part, length // part
        terms, rounds = terms.sum(axis, keepdim=True), rounds + length
    return terms, rounds


def multiply(left: Tensor, right: Tensor, size: Tensor | None = None) -> Tensor:
    """Return the products of float32 matrices, given in float64 as ``[b, m, k]`` and ``[b, k, n]``.

    ``size`` has bounds of the norms of the right matrix's columns, if the caller knows them.
    """
    rows, columns = left.shape[1], right.shape[2]
    if not left.numel() or not right.numel():
        return left.new_zeros((len(left), rows, columns), dtype=torch.float32)

    def locate(places: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        batch, place = places // (rows * columns), places % (rows * columns)
        return batch, place // columns, place % columns

    def find_terms(places: Tensor) -> Tensor:
        batch, row, column = locate(places)
        return left[batch, row] * right[batch, :, column]

    def have_terms(places: Tensor) -> Tensor:  # units that ReLU turns off leave few
        batch, row, column = (one.numpy() for one in locate(places))
        mine, other = (
            np.packbits(one.numpy() != 0, axis=axis) for one, axis in ((left, 2), (right, 1))
        )
        return torch.from_numpy((mine[batch, row] & other.swapaxes(1, 2)[batch, column]).any(1))

    fast = have_terms if left.device.type == "cpu" else None
    parts = zip(left.split(BLOCK, 2), right.split(BLOCK, 1), strict=True)
    return multiply_parts(parts, find_terms, fast, size)


def multiply_parts(
    parts: Iterable[tuple[Tensor, Tensor]],
    find_terms: Terms,
    have_terms: Terms | None = None,
    size: Tensor | None = None,
) -> Tensor:
    """Return the sum of the products of pairs of matrices, each rounded once; see ``multiply``.

    Args:
        parts: The pairs, each with at most ``BLOCK`` terms.
        find_terms: See :func:`settle`.
        have_terms: See :func:`settle`.
        size: Bounds of the norms of all columns of the right matrices, if they are known.
    """
    (first, second), *others = parts
    total, terms = torch.bmm(first, second), first.shape[2] + 3
    bounds = [measure(first, 2), measure(second, 1) if size is None else size]
    for left, right in others:
        total.baddbmm_(left, right)
        terms = max(terms, left.shape[2]) + 1
        bounds[0] = torch.hypot(bounds[0], measure(left, 2)).mul_(1.0 + 2.0**-40)
        if size is None:
            bounds[1] = torch.hypot(bounds[1], measure(right, 1)).mul_(1.0 + 2.0**-40)
    bound = bounds[0].mul(2 * terms * UNIT) * bounds[1]
    return settle(total, bound, find_terms, have_terms)


def measure(matrices: Tensor, dim: int) -> Tensor:
    """Return a bound of the Euclidean norms along a dimension, which stays."""
    if matrices.stride(dim) == 1:
        norms: Tensor = torch.linalg.vector_norm(matrices, dim=dim, keepdim=True)
        return norms.mul_(1.0 + 2.0**-20)
    return matrices.square().sum(dim, keepdim=True).sqrt_().mul_(1.0 + 2.0**-20)


def multiply_doubles(left: Tensor, right: Tensor) -> Tensor:
    """Return the products of float64 matrices; the same bits in any order (Ozaki's scheme).

    Rows and columns are cut into pieces of so few bits that every sum of products of two pieces is
    exact. The pieces keep at least 55 bits below the greatest element of a row or a column.
    """
    inner = left.shape[2]
    if not left.numel() or not right.numel():
        return left.new_zeros((len(left), left.shape[1], right.shape[2]))
    number = 3
    while True:
        bits = (51 - (number * inner - 1).bit_length()) // 2
        if bits * number >= 55:
            break
        number += 1
    parts, left_scale = _cut(left, 2, bits, number)
    others, right_scale = _cut(right, 1, bits, number)
    result = left.new_zeros(())
    for order in reversed(range(number)):
        wide = torch.cat(parts[: order + 1], dim=2)
        high = torch.cat(others[: order + 1][::-1], dim=1)
        exact = torch.bmm(wide, high)
        result = exact if order == number - 1 else exact.add_(result)
    result.mul_(left_scale).mul_(right_scale).add_(0.0)
    bad = ~(left.isfinite().all(2, keepdim=True) & right.isfinite().all(1, keepdim=True))
    if bool(bad.any()):
        special = [torch.where(one.isfinite(), one.sign(), one) for one in (left, right)]
        result = torch.where(bad, torch.bmm(*special), result)
    return result


def _cut(matrices: Tensor, dim: int, bits: int, number: int) -> tuple[list[Tensor], Tensor]:
    """Cut each vector along a dimension into pieces; return also the scale of each vector."""
    finite = torch.where(matrices.isfinite(), matrices, 0.0)
    top = finite.abs().amax(dim, keepdim=True).contiguous()
    exponent = ((top.view(torch.int64) >> 52) - 1023).clamp_(-1022, 1022)
    rest = finite * ((1023 - exponent) << 52).view(torch.float64)
    pieces = []
    for place in range(1, number + 1):
        constant = 1.5 * 2.0 ** (52 - bits * place)
        piece = (rest + constant).sub_(constant)
        rest = rest - piece
        pieces.append(piece)
    return pieces, ((1023 + exponent) << 52).view(torch.float64)


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
    count = math.prod(values.shape[dim] for dim in dims)
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
