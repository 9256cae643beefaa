"""Sums and linear operations of float32 numbers, rounded once from their exact values.

float64 holds every product of two float32 numbers. A sum of n such terms in float64, in any order
and by any library, is off by at most n * 2**-53 times the sum of their sizes. If all numbers within
a little more than this bound round to one float32 number, that number is the exact sum rounded,
whatever the order was. Otherwise (for about one element in 10,000) the terms of the element are cut
into pieces that add exactly (``patches.exact_sums``), as many as hold all of their bits. Which
elements need it may differ between machines; the results do not. Sums of float64 numbers are those
of ``patches.exact_sums``, and products of float64 numbers come from Ozaki's scheme.

Interpolation and average pooling act on one dimension after the other. The matrix of one dimension
is what torch's own operation does to the identity matrix, in float64, rounded to a multiple of
``2**-30``: machines may differ in its last places. The gradient is a product with the transposed
matrix.
"""

import math
import re
from collections.abc import Callable, Sequence
from functools import cache, lru_cache, partial
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from lightning_d9m.patches.exact_sums import (
    cut_terms,
    find_cuts,
    plan_pieces,
    read_exponents,
    round_sums,
)
from lightning_d9m.patches.kernels.separable import (
    Side,
    adaptive_sides,
    pool_sides,
    resize_sides,
    run_side,
)
from lightning_d9m.portability.registry import RULES, rule

BLOCK = 512
"""Terms that are added at a time: shorter sums have smaller bounds."""

_CHUNK = 2**15  # sums that are rounded at a time: they stay in a core's cache
_MOST_TERMS = 2**20  # that are added exactly at a time
_FEW_TERMS = 2**12  # that Python adds sooner than torch cuts them
_GRID = 2.0**30


Terms = Callable[[Tensor], Tensor]
"""A function of flat positions of sums: their terms, ``[sums, terms]``, or their bounds."""


def settle(
    total: Tensor,
    bound: Tensor,
    find_terms: Terms,
    length: int,
    find_bound: Terms | None = None,
) -> Tensor:
    """Round float64 sums to float32 as their exact values round.

    Args:
        total: The sums; any order of additions.
        bound: More than the greatest error of each sum, or of so many sums in turn; see
            :func:`_find_factor`.
        find_terms: Returns the terms of some sums in float64.
        length: The number of terms of a sum.
        find_bound: Returns closer bounds of some sums, which many zeros make small.
    """
    flat = total.reshape(-1)
    margins = bound.reshape(-1, 1).expand(-1, len(flat) // bound.numel()).reshape(-1)
    result, places = _round(flat, margins)
    if find_bound is not None and len(places) > len(flat) // 256:
        result[places], left = _round(flat[places], find_bound(places))
        places = places[left]
    if len(places):
        result[places] = flat[places].float()
        places = places[flat[places].isfinite()]
    if len(places):
        for some in places.split(max(1, _MOST_TERMS // length)):
            terms = find_terms(some)
            if terms.numel() <= _FEW_TERMS:
                exact = [_add_to_odd(row) for row in terms.tolist()]
                result[some] = torch.tensor(exact, dtype=torch.float64, device="cpu").to(result)
                continue
            pieces, tops = cut_exactly(terms, 1)
            sums = [piece.sum(1, keepdim=True) for piece in pieces]
            result[some] = round_sums(sums, tops, torch.float32).view(-1)
    return result.add_(0.0).view(total.shape)  # one zero


def _add_to_odd(terms: list[float]) -> float:
    """Return the sum with a last bit of 1 unless it is exact, so that it can be rounded again."""
    total = math.fsum(terms)
    rest = math.fsum([*terms, -total])
    if rest and not int(math.frexp(total)[0] * 2.0**53) & 1:
        return math.nextafter(total, math.copysign(math.inf, rest))
    return total


def _round(total: Tensor, bound: Tensor) -> tuple[Tensor, Tensor]:
    """Return sums in float32, and the places of those that a bound of the error may change."""
    if total.device.type != "cpu":
        result = (total + bound).float()
        return result, ((total - bound).float() != result).nonzero().view(-1)
    result = torch.empty_like(total, dtype=torch.float32)
    sums, margins, highest = (one.numpy() for one in (total, bound, result))
    lowest, places = np.empty(min(len(sums), _CHUNK), dtype=np.float32), [np.empty(0, np.int64)]
    with np.errstate(all="ignore"):  # NumPy adds and rounds in one pass
        for start in range(0, len(sums), _CHUNK):
            part = slice(start, start + _CHUNK)
            high, low = highest[part], lowest[: len(highest[part])]
            np.add(sums[part], margins[part], out=high, casting="same_kind")
            np.subtract(sums[part], margins[part], out=low, casting="same_kind")
            places.append(np.flatnonzero(high != low) + start)
    return result, torch.from_numpy(np.concatenate(places))


def cut_exactly(terms: Tensor, dim: int) -> tuple[list[Tensor], Tensor]:
    """Cut finite float64 terms into pieces that hold all of their bits, and add exactly.

    Returns:
        The pieces, and the exponents of the sums for ``round_sums``.
    """
    exponents = read_exponents(terms)
    tops = exponents.amax(dim, keepdim=True)
    span = int(torch.where(exponents > 0, tops - exponents, 0).max())
    pieces = plan_pieces(torch.float64, terms.shape[dim], span)
    return cut_terms(terms, find_cuts(tops, pieces, torch.float64)), tops


def add_terms(
    values: Tensor, dims: Sequence[int] | None, *, keepdim: bool, dtype: torch.dtype
) -> Tensor:
    """Return the sum over dimensions, rounded once to a dtype (twice to one of 16 bits).

    The terms are float32 numbers, or float64 numbers below 2**512.
    """
    count = values.dim()
    axes = sorted({dim % count for dim in (dims or range(count))}) if count else []
    terms = values.to(torch.float64)
    if not values.numel():
        total = values.sum(axes, keepdim=True, dtype=dtype)
    elif dtype == torch.float64:
        tops = read_exponents(terms).amax(axes, keepdim=True)
        pieces = plan_pieces(dtype, terms.numel() // tops.numel())
        sums = [
            one.sum(axes, keepdim=True) for one in cut_terms(terms, find_cuts(tops, pieces, dtype))
        ]
        total = round_sums(sums, tops, dtype) + 0.0
    else:
        wide, rounds = _reduce(terms, axes)
        size, _ = _reduce(terms.abs(), axes)
        others = [axis for axis in range(count) if axis not in axes]

        def find_terms(places: Tensor) -> Tensor:
            index = torch.unravel_index(places, wide.shape)
            rows = terms.permute(*others, *axes)[tuple(index[axis] for axis in others)]
            return rows.reshape(len(places), -1)

        bound = size.mul_(_find_factor(rounds))
        total = settle(wide, bound, find_terms, values.numel() // wide.numel()).to(dtype)
    return total if keepdim or not axes else total.squeeze(axes)


def _reduce(terms: Tensor, axes: Sequence[int]) -> tuple[Tensor, int]:
    """Add over dimensions one after the other; return also the greatest number of roundings."""
    rounds = 0
    for axis in reversed(axes):
        length = terms.shape[axis]
        part = math.gcd(length, BLOCK)
        if length > 2 * BLOCK and part > 1:
            terms = terms.unflatten(axis, (length // part, part)).sum(axis + 1)
            rounds, length = rounds + part, length // part
        terms, rounds = terms.sum(axis, keepdim=True), rounds + length
    return terms, rounds


def find_lengths(values: Tensor, *dims: int) -> Tensor:
    """Return the lengths of vectors of float64 numbers that were float32 numbers."""
    return (values * values).sum(dims, keepdim=True).sqrt_()


def _find_factor(roundings: int) -> float:
    """Return the error of a sum in relation to the sum of the sizes of its terms.

    Two roundings and a part in 20 more cover the errors of a bound itself, and of adding it.
    """
    return 1.05 * (roundings + 2) * 2.0**-53


def combine(
    function: Callable[[Tensor, Tensor], Tensor],
    left: Tensor,
    right: Tensor,
    lengths: tuple[Tensor, Tensor],
    find_terms: Terms,
    length: int,
    roundings: int,
) -> Tensor:
    """Return sums of products, rounded once.

    Args:
        function: Adds the products of numbers of two tensors in any order.
        left: Float64 numbers that were float32 numbers.
        right: As ``left``.
        lengths: Those of the vectors that each sum multiplies; no sum of the sizes of its terms is
            greater than their product (Cauchy and Schwarz).
        find_terms: See :func:`settle`.
        length: The number of terms of a sum.
        roundings: The greatest number of roundings of a sum.
    """
    factor = _find_factor(roundings)

    def find_bound(places: Tensor) -> Tensor:
        # The sizes of the terms; float32 gives them up to small errors, and up to what underflows.
        size = function(left.float().abs_(), right.float().abs_())
        size = size.reshape(-1)[places].double()
        return size.mul_((1 + length * 2.0**-22) * factor).add_(length * 2.0**-119 * factor)

    total = function(left, right)
    bound = lengths[0].mul(factor).mul(lengths[1])
    return settle(total, bound, find_terms, length, find_bound)


def multiply_doubles(left: Tensor, right: Tensor) -> Tensor:
    """Return the products of float64 matrices; the same bits in any order (Ozaki's scheme).

    Rows and columns are cut into pieces of so few bits that every sum of products of two pieces is
    exact. The pieces keep at least 55 bits below the greatest element of a row or a column.
    """
    inner = left.shape[2]
    number = 3
    while (bits := (51 - (number * inner - 1).bit_length()) // 2) * number < 55:
        number += 1
    parts, left_scale = _cut(left, 2, bits, number)
    others, right_scale = _cut(right, 1, bits, number)
    result = left.new_zeros(())
    for order in reversed(range(number)):
        wide = torch.cat(parts[: order + 1], dim=2)
        high = torch.cat(others[: order + 1][::-1], dim=1)
        result = torch.bmm(wide, high) + result
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
    exponent = (read_exponents(top).to(torch.int64) - 1023).clamp_(-1022, 1022)
    rest = finite * ((1023 - exponent) << 52).view(torch.float64)
    pieces = []
    for place in range(1, number + 1):
        constant = 1.5 * 2.0 ** (52 - bits * place)
        piece = (rest + constant).sub_(constant)
        rest = rest - piece
        pieces.append(piece)
    return pieces, ((1023 + exponent) << 52).view(torch.float64)


def matmul(left: Tensor, right: Tensor) -> Tensor:
    """Return the product of matrices, or of batches of them (``mm``, ``bmm``)."""
    shape = (*left.shape[:-1], right.shape[-1])
    if not left.numel() or not right.numel():
        return left.new_zeros(shape)
    rows, columns = (one.view(-1, *one.shape[-2:]).double() for one in (left, right))
    if left.dtype == torch.float64:
        return multiply_doubles(rows, columns).view(shape)
    inner = rows.shape[2]

    def find_terms(places: Tensor) -> Tensor:
        row, column = places // columns.shape[2], places % columns.shape[2]
        batch, row = row // rows.shape[1], row % rows.shape[1]
        return rows[batch, row] * columns[batch, :, column]

    def multiply_blocks(left: Tensor, right: Tensor) -> Tensor:
        parts = zip(left.split(BLOCK, 2), right.split(BLOCK, 1), strict=True)
        total = torch.bmm(*next(parts))
        for part, other in parts:
            total += torch.bmm(part, other)
        return total

    lengths = find_lengths(rows, 2), find_lengths(columns, 1)
    rounds = min(inner, BLOCK) + inner // BLOCK
    found = combine(multiply_blocks, rows, columns, lengths, find_terms, inner, rounds)
    return found.view(shape).to(left)


def find_reads(
    given: Sequence[Any], sizes: Sequence[int], counts: Sequence[int], kernel: Sequence[int]
) -> Tensor:
    """Return the flat place of an image that each window reads with each tap of a kernel.

    Args:
        given: The arguments of a convolution after input, weight and bias.
        sizes: Those of the image.
        counts: The number of windows along each dimension.
        kernel: The number of taps along each dimension.

    Returns:
        The places, ``[windows, taps]``; -1 beside the image.
    """
    places = torch.arange(1, prod(sizes) + 1, dtype=torch.float64, device="cpu").view(1, 1, *sizes)
    taps = torch.eye(prod(kernel), dtype=torch.float64, device="cpu").view(-1, 1, *kernel)
    # A kernel of a single 1 moves the number of a place, or the 0 beside the image.
    more = (*given[:3], False, [0] * len(sizes), 1)
    found: Tensor = torch.ops.aten.convolution(places, taps, None, *more)[0]
    inside = (slice(None), *map(slice, counts))
    return found[inside].flatten(1).t().to(torch.int64) - 1


def _turn(reads: Tensor, size: int) -> Tensor:
    """Return the window that reads each of so many places of an image with each tap, or -1."""
    windows, taps = (torch.arange(length, device="cpu") for length in reads.shape)
    turned = torch.full((size + 1, len(taps)), -1, device="cpu")
    turned[reads, taps] = windows.unsqueeze(1)  # the last row is that of place -1
    return turned[:size]


def _convolve(
    function: Callable[[Tensor, Tensor], Tensor],
    values: Tensor,
    weight: Tensor,
    groups: int,
    sizes: Sequence[int],
    find_reads: Callable[[], Tensor],
    *,
    turned: bool = False,
    roundings: int = 0,
) -> Tensor:
    """Return a convolution to some sizes, or a turned one, which goes back from its windows."""
    batch = len(values)
    rows = weight.flatten(2).unflatten(0, (groups, -1))  # [groups, rows, channels, taps]
    rows = rows.transpose(1, 2) if turned else rows
    count = groups * rows.shape[1]

    @cache
    def list_lines() -> tuple[Tensor, Tensor]:
        reads = _turn(find_reads(), prod(sizes)) if turned else find_reads()
        lines = pad(values.flatten(2), (0, 1))  # place -1 holds 0
        return lines.unflatten(1, (groups, -1)), reads.to(values.device)

    if values.dtype == torch.float64:
        lines, reads = list_lines()
        columns = lines[..., reads].permute(1, 2, 4, 0, 3).flatten(3).flatten(1, 2)
        found = multiply_doubles(rows.flatten(2), columns)
        return found.view(count, batch, -1).transpose(0, 1).reshape(batch, count, *sizes)

    def find_terms(places: Tensor) -> Tensor:
        lines, reads = list_lines()
        sample, row, place = torch.unravel_index(places, (batch, count, len(reads)))
        channel = torch.arange(lines.shape[2], device=lines.device).unsqueeze(1)
        lists = (one.view(-1, 1, 1) for one in (sample, row // rows.shape[1]))
        where = (*lists, channel, reads[place].unsqueeze(1))
        return torch.mul(lines[where].double(), rows.flatten(0, 1)[row]).flatten(1)

    wide, other = values.double(), weight.double()
    squares = wide.square().unflatten(1, (groups, -1)).sum(2)
    windows = function(squares, other.new_ones((groups, 1, *weight.shape[2:]))).sqrt_()
    others = find_lengths(rows.double(), 2, 3).view(groups, -1, *[1] * len(sizes))
    lengths, length = (others, windows.unsqueeze(2)), rows[0, 0].numel()
    more = (lengths, find_terms, length, roundings or length)
    return combine(function, wide, other, *more).to(values.dtype)


@rule("convolution", "_convolution", "convolution_overrideable")
def convolve(values: Tensor, weight: Tensor, bias: Tensor | None, *arguments: Any) -> Tensor:
    """A convolution: exact sums over its windows."""
    if values.dim() == weight.dim() - 1:
        return convolve(values.unsqueeze(0), weight, bias, *arguments)[0]
    given = arguments[:6]
    transposed, groups = given[3], given[5]

    def function(left: Tensor, right: Tensor) -> Tensor:
        result: Tensor = torch.ops.aten.convolution(left, right, None, *given)
        return result

    sizes = function(*(one.to("meta") for one in (values, weight))).shape[2:]
    image, counts = (sizes, values.shape[2:]) if transposed else (values.shape[2:], sizes)
    reads = partial(find_reads, given, image, counts, weight.shape[2:])
    result = _convolve(function, values, weight, groups, sizes, reads, turned=transposed)
    return result if bias is None else result.add_(bias.view(-1, *[1] * len(sizes)))


@rule("convolution_backward")
def convolve_backward(
    gradient: Tensor, values: Tensor, weight: Tensor, _bias_sizes: Any, *arguments: Any
) -> tuple[Tensor | None, ...]:
    """The gradients of a convolution for its input, its weight and its bias."""
    *given, mask = arguments
    transposed, groups = given[3], given[5]

    def function(left: Tensor, right: Tensor) -> Tensor:
        channels = len(right) if transposed else right.shape[1] * groups
        like = left.new_empty(()).expand(len(left), channels, *values.shape[2:])
        wanted = (like, right, None, *given, [True, False, False])
        return torch.ops.aten.convolution_backward(left, *wanted)[0]  # type: ignore[no-any-return]

    small, large = (values, gradient) if transposed else (gradient, values)
    reads = partial(find_reads, given, large.shape[2:], small.shape[2:], weight.shape[2:])
    back = (gradient, weight, groups, values.shape[2:], reads)
    dims = (0, *range(2, gradient.dim()))
    return (
        _convolve(function, *back, turned=not transposed) if mask[0] else None,
        _differentiate_by_weight(small, large, weight.shape, given, reads) if mask[1] else None,
        add_terms(gradient, dims, keepdim=False, dtype=gradient.dtype) if mask[2] else None,
    )


def _differentiate_by_weight(
    small: Tensor,
    large: Tensor,
    shape: Sequence[int],
    given: Sequence[Any],
    reads: Callable[[], Tensor],
) -> Tensor:
    """Return the gradient for the weight: a convolution whose weight is the smaller tensor.

    Batch and channels, and windows and taps, change places.
    """
    groups, batch = given[5], len(small)
    area = prod(small.shape[2:])
    each = max(1, BLOCK // area)

    def function(left: Tensor, right: Tensor) -> Tensor:
        image = left.unflatten(1, (groups, -1)).transpose(0, 2).flatten(1, 2)
        pair = (image, right.transpose(0, 1)) if given[3] else (right.transpose(0, 1), image)
        like = left.new_empty(()).expand(len(right), len(left), *shape[2:])
        total = torch.zeros((), dtype=left.dtype, device=left.device)
        for one in zip(*(part.split(each) for part in pair), strict=True):
            more = (*one, like, None, *given, [False, True, False])
            total = total + torch.ops.aten.convolution_backward(*more)[1]
        return total.transpose(0, 1)

    found = _convolve(
        function,
        large.unflatten(1, (groups, -1)).transpose(0, 2).flatten(1, 2),
        small.transpose(0, 1),
        groups,
        shape[2:],
        lambda: reads().t(),
        roundings=each * area + batch // each,
    )
    return found.transpose(0, 1).contiguous()


@lru_cache(maxsize=256)
def _read_matrix(size: int, *side: Any) -> Tensor:
    """Return the matrix ``[outputs, inputs]`` of an operation along one dimension."""
    found = run_side(*side, torch.eye(size, dtype=torch.float64, device="cpu"))
    return found.t().mul(_GRID).round_().div_(_GRID).contiguous()


def _apply(
    sides: Sequence[Side], sizes: Sequence[int], values: Tensor, *, turned: bool = False
) -> Tensor:
    """Multiply each of the last dimensions by its matrix, or by the transposed one."""
    for axis, size, side in zip(range(-len(sides), 0), sizes[-len(sides) :], sides, strict=True):
        matrix, moved = _read_matrix(size, *side), values.movedim(axis, 0)
        factor = (matrix.t() if turned else matrix).to(values)
        product = matmul(factor, moved.reshape(moved.shape[0], -1))
        values = product.view(-1, *moved.shape[1:]).movedim(0, axis)
    return values.contiguous()


def _resize(name: str, out: Sequence[int], *given: Any, **named: Any) -> list[Side]:
    given = (*given, *named.values())
    corners = () if "nearest" in name else given[:1]
    if not ("cubic" in name or name.endswith("_aa")):
        name = f"{re.sub('(bi|tri)?linear', 'linear', name)[:-2]}1d"
    return resize_sides(name, out, given[len(corners) :], *corners)


def _register(
    dims: int, name: str, find: Callable[..., list[Side]], *, forward: bool = True
) -> None:
    """Register an operation on the last dimensions, and its gradient.

    Args:
        dims: The number of the dimensions.
        name: That of the operation.
        find: Returns the sides for the operation's arguments.
        forward: Whether the operation itself does not only move values.
    """

    def apply(values: Tensor, *given: Any, **named: Any) -> Tensor:
        return _apply(find(*given, **named), values.shape, values)

    def differentiate(gradient: Tensor, *given: Any, **named: Any) -> Tensor:
        if "upsample" in name:
            out, sizes, *more = given
            more = [out, *more]
        else:
            values, *more = given
            sizes, more = values.shape, more or [gradient.shape[-dims:]]  # if adaptive
        return _apply(find(*more, **named), sizes, gradient, turned=True)

    RULES[f"{name}_backward"] = differentiate
    if forward:
        RULES[name] = apply


_RESIZED = {
    1: ("upsample_linear1d",),
    2: (
        *("upsample_bilinear2d", "upsample_bicubic2d", "_upsample_bilinear2d_aa"),
        *("_upsample_bicubic2d_aa", "_upsample_lanczos2d_aa"),
    ),
    3: ("upsample_trilinear3d",),
}
for _dims, _names in _RESIZED.items():
    for _name in _names:
        _register(_dims, _name, partial(_resize, _name))
    for _name in (f"upsample_nearest{_dims}d", f"_upsample_nearest_exact{_dims}d"):
        _register(_dims, _name, partial(_resize, _name), forward=False)
    _register(_dims, f"avg_pool{_dims}d", partial(pool_sides, _dims))
    _register(_dims, f"_adaptive_avg_pool{_dims}d", adaptive_sides)
