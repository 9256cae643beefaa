"""Rules for linear operations: products of matrices, convolutions, interpolation, pooling.

A convolution is a product of matrices whose elements are where offsets say, so its columns are
never written to memory. Its sums run over channels first, then over the taps of the kernel; those
of the gradient for the weight over samples, then over windows. The gradient for the input has one
product for each remainder of a position by the stride, with the taps that reach it: no term
multiplies a zero between strides. Positions beside the image are zeros.

Interpolation and average pooling act on one dimension after the other. The matrix of one dimension
is what torch's own operation does to the identity matrix, in float64, rounded to a multiple of
``2**-30``: machines may differ in its last places. The gradient is a product with the transposed
matrix.
"""

import re
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from itertools import product
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from lightning_d9m.ops.patches.kernels.separable import (
    Side,
    adaptive_sides,
    pool_sides,
    resize_sides,
    run_side,
)
from lightning_d9m.ops.portability.kernels import Offsets, add, count_steps, multiply_at, widen
from lightning_d9m.ops.portability.kernels import multiply as multiply_batches
from lightning_d9m.ops.portability.registry import RULES, rule

# Coarser than the last places of float64, in which machines differ; finer than those of float32.
_GRID = 2.0**30


@rule("mm", "bmm")
def multiply(left: Tensor, right: Tensor) -> Tensor:
    """The product of matrices, or of batches of them."""
    one, other = widen(left), widen(right)
    # The kernel has a batch always; `mm` is a batch of one.
    if one.dim() == 3:
        return multiply_batches(one, other).to(left.dtype)
    return multiply_batches(one.unsqueeze(0), other.unsqueeze(0))[0].to(left.dtype)


RULES |= {
    "mv": lambda matrix, vector: multiply(matrix, vector.unsqueeze(1)).squeeze(1),
    "dot": lambda left, right: multiply(left.unsqueeze(0), right.unsqueeze(1)).view(()),
}


@rule("addmm")
def add_product(start: Tensor, left: Tensor, right: Tensor, **factors: float) -> Any:
    """A product and its start, which is added last."""
    if any(factor != 1 for factor in factors.values()):
        return NotImplemented  # torch's decomposition multiplies by each factor, with one rounding
    return multiply(left, right).add_(start)


def _grid(steps: Sequence[int], *places: Sequence[int]) -> Tensor:
    """Return the offsets of a grid of places, by the step of each dimension in memory."""
    # On the CPU by name: a program may have set another default device.
    total = torch.zeros((), dtype=torch.int64, device="cpu")
    for step, own in zip(steps, places, strict=True):
        total = total.unsqueeze(-1) + torch.tensor(own, dtype=torch.int64, device="cpu") * step
    return total.flatten()


def _steps(sizes: Sequence[int]) -> list[int]:
    return [prod(sizes[place + 1 :]) for place in range(len(sizes))]


class Geometry(NamedTuple):
    """The sizes of a convolution, without its batch and channels.

    Attributes:
        image: Of the side that windows read.
        windows: Their numbers.
        taps: Of the kernel.
        stride: The argument of the operation, as are the others.
    """

    image: tuple[int, ...]
    windows: tuple[int, ...]
    taps: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]


# Each layer of a model has one geometry in all of its steps.
@lru_cache(maxsize=128)
def _find_phases(geometry: Geometry, device: torch.device) -> tuple[list[int], list[list[Tensor]]]:
    """Return places for the gradient for the image.

    Zeros before and after the windows of each dimension, for ``pad``; and for each remainder by the
    strides the numbers of the taps that reach it, and the offsets of windows by tap, of windows by
    position, and of positions.
    """
    sides, lists, wide = list[int](), [], list[int]()
    for size, count, taps, step, before, apart in zip(*geometry, strict=True):
        low = max(0, -((before - (taps - 1) * apart) // step))
        high = max(0, (before + size - 1) // step - (count - 1))
        sides, wide = [low, high, *sides], [*wide, low + count + high]
        own = []
        for rest in range(step):
            used = [tap for tap in range(taps) if tap * apart % step == rest]
            first = -((rest - before) // step)
            turns = range(first, (before + size - 1 - rest) // step + 1)
            reads = [(rest - tap * apart) // step + low for tap in used]
            own.append((used, reads, [*turns], [rest + step * t - before for t in turns]))
        lists.append(own)
    steps = (_steps(geometry.taps), _steps(wide), _steps(wide), _steps(geometry.image))
    phases = [
        [_grid(steps[n], *(own[n] for own in phase)).to(device) for n in range(4)]
        for phase in product(*lists)
    ]
    return sides, [phase for phase in phases if all(map(len, phase))]


_Placed = tuple[Tensor, dict[str, Tensor]]
"""A tensor, and the offsets in memory of its indices by the letter of the dimension.

n samples, g groups, c channels of a group of the image, o of its windows, t taps, w windows.
"""


def _place(tensor: Tensor, letters: str, groups: int, **others: Tensor) -> _Placed:
    """Name the dimensions of a tensor, of which one is divided into groups and what follows.

    Dimensions of one letter are joined in their order; ``others`` replace the offsets of a letter.
    """
    view, found = tensor.unflatten(letters.index("g"), (groups, -1)), dict[str, Tensor]()
    for letter, size, step in zip(letters, view.shape, view.stride(), strict=True):
        offsets = count_steps(size, step, tensor.device)
        found[letter] = _join([found[letter], offsets]) if letter in found else offsets
    return view, found | others


def _contract(letters: str, *tensors: _Placed) -> None:
    """Write products of the matrices of two tensors into a third one.

    Args:
        letters: The indices of rows, of terms, of columns and of the batch, divided by spaces.
        *tensors: The left and the right one, and the result.
    """
    rows, terms, columns, batch = letters.split()
    sides = (rows, terms), (terms, columns), (rows, columns)
    places = [
        Offsets(*(_join([own[one] for one in group]) for group in (*pair, batch)))
        for (_, own), pair in zip(tensors, sides, strict=True)
    ]
    left, right, out = (tensor for tensor, _ in tensors)
    multiply_at(left, right, out, *places)


def _join(parts: Sequence[Tensor]) -> Tensor:
    total, *others = parts
    for one in others:
        total = (total.unsqueeze(1) + one).flatten()
    return total


def _pad(image: Tensor, geometry: Geometry, value: float = 0) -> Tensor:
    """Return an image with what windows read beside it, at the end as much as the last needs."""
    beside = list[int]()
    for size, count, taps, step, before, apart in zip(*geometry, strict=True):
        # Less than the padding where the last windows do not reach the end, more where `ceil_mode`
        # of a pooling lets the last window begin inside.
        after = (count - 1) * step + (taps - 1) * apart + 1 - size - before
        beside = [before, max(before, after), *beside]
    return pad(image, beside, value=value) if any(beside) else image


def _view_windows(padded: Tensor, geometry: Geometry) -> Tensor:
    """Return a view of a padded image ``[..., windows, taps]``, by dimension."""
    first, view = padded.dim() - len(geometry.taps), padded
    for dim, (_, count, taps, step, _, apart) in enumerate(zip(*geometry, strict=True), first):
        # A view by strides, which repeats each element in all windows that have it and copies none.
        # With a dilation, `unfold` takes the whole reach of the kernel, of which every `apart`-th
        # element is a tap.
        view = view.unfold(dim, (taps - 1) * apart + 1, step).narrow(dim, 0, count)[..., ::apart]
    return view


def _place_all(
    image: Tensor, weight: Tensor, windows: Tensor, geometry: Geometry, groups: int
) -> tuple[_Placed, _Placed, _Placed]:
    """Return a convolution's image, as windows and taps read it, its weight, and its windows."""
    dims, view = len(geometry.taps), _view_windows(_pad(image, geometry).contiguous(), geometry)
    return (
        _place(view, "ngc" + "w" * dims + "t" * dims, groups),
        _place(weight.contiguous(), "goc" + "t" * dims, groups),
        _place(windows.contiguous(), "ngo" + "w" * dims, groups),
    )


def _convolve(image: Tensor, weight: Tensor, geometry: Geometry, groups: int) -> Tensor:
    """Return the sums over the windows of an image."""
    out = image.new_empty((len(image), len(weight), *geometry.windows))
    right, left, result = _place_all(image, weight, out, geometry, groups)
    # The order of the letters of terms is the order of the additions, and so decides bits.
    _contract("o ct nw g", left, right, result)
    return out


def _differentiate_by_weight(
    gradient: Tensor, image: Tensor, shape: Sequence[int], geometry: Geometry, groups: int
) -> Tensor:
    """Return the gradient for the weight."""
    # `new_empty`, because a product writes each element: 0 where it has no terms.
    out = gradient.new_empty(tuple(shape))
    right, result, left = _place_all(image, out, gradient, geometry, groups)
    _contract("o nw ct g", left, right, result)
    return out


def _convolve_back(gradient: Tensor, weight: Tensor, geometry: Geometry, groups: int) -> Tensor:
    """Return the gradient for the image; also a transposed convolution."""
    sides, phases = _find_phases(geometry, gradient.device)
    read, weight = pad(gradient, sides).flatten(2).contiguous(), weight.flatten(2).contiguous()
    # Positions that no tap reaches stay zeros: no phase writes them.
    out = gradient.new_zeros((len(gradient), weight.shape[1] * groups, *geometry.image))
    for used, reads, turns, places in phases:
        left = _place(weight, "goct", groups, t=used)
        right = _place(read, "ngow", groups, t=reads, w=turns)
        _contract("c ot nw g", left, right, _place(out.flatten(2), "ngcw", groups, w=places))
    return out


def _lay_out(image: Any, windows: Any, taps: Any, given: Any) -> Geometry:
    dims = len(image)
    given = (tuple(one) * (dims if len(one) == 1 else 1) for one in given[:3])
    return Geometry(tuple(image), tuple(windows), tuple(taps), *given)


@rule("convolution", "_convolution", "convolution_overrideable")
def convolve(values: Tensor, weight: Tensor, bias: Tensor | None, *arguments: Any) -> Tensor:
    """A convolution, and its bias, which is added last."""
    if values.dim() == weight.dim() - 1:
        return convolve(values.unsqueeze(0), weight, bias, *arguments)[0]
    given, transposed, groups = arguments[:3], arguments[3], arguments[5]
    more = (*given, transposed, arguments[4], groups)
    # On the meta device: torch's shape rules, and its errors for wrong shapes, without its kernel.
    shapes = (one.to("meta") for one in (values, weight))
    # The output padding has its effect here alone: it only makes the result larger.
    sizes = torch.ops.aten.convolution(*shapes, None, *more).shape[2:]
    image, windows = (sizes, values.shape[2:]) if transposed else (values.shape[2:], sizes)
    geometry = _lay_out(image, windows, weight.shape[2:], given)
    function = _convolve_back if transposed else _convolve
    result = function(widen(values), widen(weight), geometry, groups).to(values.dtype)
    return result if bias is None else result.add_(bias.view(-1, *[1] * len(sizes)))


@rule("convolution_backward")
def convolve_backward(
    gradient: Tensor, values: Tensor, weight: Tensor, _bias_sizes: Any, *arguments: Any
) -> tuple[Tensor | None, ...]:
    """The gradients of a convolution for its input, its weight and its bias."""
    *given, transposed, _, groups, mask = arguments
    wide, image, factors = widen(gradient), widen(values), widen(weight)
    # A transposed convolution is the gradient of a convolution, so the two change places.
    small, large = (image, wide) if transposed else (wide, image)
    geometry = _lay_out(large.shape[2:], small.shape[2:], weight.shape[2:], given)
    back = _convolve if transposed else _convolve_back
    dims = (0, *range(2, gradient.dim()))
    return (
        back(wide, factors, geometry, groups).to(values.dtype) if mask[0] else None,
        _differentiate_by_weight(small, large, weight.shape, geometry, groups).to(weight.dtype)
        if mask[1]
        else None,
        add(wide, dims).to(gradient.dtype) if mask[2] else None,
    )


def _differentiate_maxima(
    dims: int, gradient: Tensor, values: Tensor, kernel: Sequence[int], *given: Any
) -> Tensor:
    """Add the gradients of windows to their places: of each place in the order of the taps."""
    stride, *more, _, indices = given
    sizes, kernel = values.shape[-dims:], [*kernel] * (dims if len(kernel) == 1 else 1)
    geometry = _lay_out(sizes, gradient.shape[-dims:], kernel, (stride or kernel, *more))
    numbers = torch.arange(prod(sizes), device=values.device).view(1, *sizes)
    # No index of a maximum is -1, so a place in the padding never gets a gradient.
    places = _view_windows(_pad(numbers, geometry, -1), geometry)[0]
    total = _pad(torch.zeros_like(widen(values)), geometry)
    sums = _view_windows(total, geometry)
    # Windows of one tap never overlap, so each pass adds at most one term to a place.
    for taps in product(*map(range, kernel)):
        at: Any = (..., *taps)
        sums[at] += torch.where(places[at] == indices, gradient, 0.0)
    for dim, (before, size) in enumerate(zip(geometry.padding, sizes, strict=True), -dims):
        total = total.narrow(dim, before, size)
    return total.to(values.dtype).contiguous()


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
        found = multiply(factor, moved.reshape(moved.shape[0], -1))
        values = found.view(-1, *moved.shape[1:]).movedim(0, axis)
    return values.contiguous()


def _resize(name: str, out: Sequence[int], *given: Any, **named: Any) -> list[Side]:
    given = (*given, *named.values())
    corners = () if "nearest" in name else given[:1]
    # Torch has `upsample_linear1d`, which is that of each dimension, but no `upsample_bicubic1d`
    # and none with anti-aliasing: of these the two-dimensional operation is applied.
    if not ("cubic" in name or name.endswith("_aa")):
        name = f"{re.sub('(bi|tri)?linear', 'linear', name)[:-2]}1d"
    return resize_sides(name, out, given[len(corners) :], *corners)


def _register(name: str, find: Callable[..., list[Side]], *, forward: bool = True) -> None:
    """Register an operation on the last dimensions, and its gradient.

    Args:
        name: That of the operation; the digit is the number of the dimensions.
        find: Returns the sides for the operation's arguments.
        forward: Whether the operation itself does not only move values.
    """
    dims = next(int(one) for one in name if one.isdigit())

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


_RESIZED = """upsample_linear1d upsample_bilinear2d upsample_bicubic2d upsample_trilinear3d
    _upsample_bilinear2d_aa _upsample_bicubic2d_aa _upsample_lanczos2d_aa"""
for _name in _RESIZED.split():
    _register(_name, partial(_resize, _name))
for _dims in (1, 2, 3):
    for _name in (f"upsample_nearest{_dims}d", f"_upsample_nearest_exact{_dims}d"):
        # Its forward pass copies elements, which is exact on every machine; only the gradient adds.
        _register(_name, partial(_resize, _name), forward=False)
for _dims in (2, 3):  # torch has poolings in one dimension as those of images with one line
    _register(f"avg_pool{_dims}d", partial(pool_sides, _dims))
    _register(f"_adaptive_avg_pool{_dims}d", adaptive_sides)
    # A maximum is exact, but windows of its gradient may overlap, and their sums need an order.
    RULES[f"max_pool{_dims}d_with_indices_backward"] = partial(_differentiate_maxima, _dims)
