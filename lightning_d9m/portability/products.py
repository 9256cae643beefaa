"""Linear operations: matrix products, convolutions, interpolation, and average pooling.

Products and convolutions are rounded once from their exact values. Interpolation and pooling act on
one dimension after the other. The matrix of one dimension is what torch's own operation does to the
identity matrix, in float64. Machines may differ in its last places; rounded to a multiple of
``2**-30`` it is the same everywhere. The gradient is a product with the transposed matrix.
"""

import re
from collections.abc import Callable, Sequence
from functools import cache, lru_cache, partial
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from lightning_d9m.patches.kernels.separable import (
    Side,
    adaptive_sides,
    pool_sides,
    resize_sides,
    run_side,
)
from lightning_d9m.portability.registry import RULES, rule
from lightning_d9m.portability.sums import (
    BLOCK,
    add_terms,
    combine,
    find_lengths,
    multiply,
    multiply_doubles,
)

_GRID = 2.0**30


def matmul(left: Tensor, right: Tensor) -> Tensor:
    """Return the product of matrices, or of batches of them (``mm``, ``bmm``)."""
    shape = (*left.shape[:-1], right.shape[-1])
    if not left.numel() or not right.numel():
        return left.new_zeros(shape)
    product = multiply_doubles if left.dtype == torch.float64 else multiply
    return product(*(one.view(-1, *one.shape[-2:]) for one in (left, right))).view(shape).to(left)


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
    places = torch.arange(1, prod(sizes) + 1, dtype=torch.float64).view(1, 1, *sizes)
    taps = torch.eye(prod(kernel), dtype=torch.float64).view(-1, 1, *kernel)
    # A kernel of a single 1 moves the number of a place, or the 0 beside the image.
    more = (*given[:3], False, [0] * len(sizes), 1)
    found: Tensor = torch.ops.aten.convolution(places, taps, None, *more)[0]
    inside = (slice(None), *map(slice, counts))
    return found[inside].flatten(1).t().to(torch.int64) - 1


def _turn(reads: Tensor, size: int) -> Tensor:
    """Return the window that reads each of so many places of an image with each tap, or -1."""
    windows, taps = (torch.arange(length) for length in reads.shape)
    turned = torch.full((size + 1, len(taps)), -1)
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
    found = run_side(*side, torch.eye(size, dtype=torch.float64))
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
