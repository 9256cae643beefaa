"""Gradients of ``grid_sample``: what each sample read, and with which weight.

A thread computes the neighbors of a sample and its gradient with respect to the grid. The gradient
with respect to the input is an exact sum over the samples. Coordinates and weights follow torch's
``GridSampler.h``.
"""

from collections.abc import Sequence
from functools import partial, reduce
from math import prod
from operator import mul
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_d9m.ops.patches.exact_sums import Layout, accumulate, plan_pieces
from lightning_d9m.ops.patches.registration import accumulation_dtype, require
from lightning_d9m.ops.patches.triton.launch import INT32_LIMIT, run_kernel

# torch's numbers of the modes and of the paddings.
_BILINEAR, _NEAREST, _BICUBIC = 0, 1, 2
_ZEROS, _BORDER, _REFLECTION = 0, 1, 2
_OUTSIDE = -100.0  # torch's position for coordinates that no integer can represent
_FARTHEST = 2.0**31 - 128  # the greatest position that is one: of float32, too
_CUBIC = -0.75  # the parameter of torch's cubic convolution
_NEIGHBORS: dict[int, tuple[tuple[int, tuple[float, ...]], ...]] = {
    # The offset of each neighbor, and the coefficients of the polynomial that is its weight.
    _NEAREST: ((0, (1.0,)),),
    _BILINEAR: ((0, (-1.0, 1.0)), (1, (1.0, 0.0))),
    _BICUBIC: (
        (-1, (_CUBIC, -2 * _CUBIC, _CUBIC, 0.0)),
        (0, (_CUBIC + 2, -_CUBIC - 3, 0.0, 1.0)),
        (1, (-_CUBIC - 2, 2 * _CUBIC + 3, -_CUBIC, 0.0)),
        (2, (-_CUBIC, _CUBIC, 0.0, 0.0)),
    ),
}


class Rule(NamedTuple):
    """The choices by which a sample is taken along each dimension.

    Attributes:
        neighbors: A value of ``_NEIGHBORS``.
        is_nearest: Whether the position is rounded. Only then the grid has no gradient.
        pads_neighbors: Whether each neighbor is moved inside, in place of the sample.
        padding: torch's number of the padding.
        align_corners: torch's argument.
    """

    neighbors: tuple[tuple[int, tuple[float, ...]], ...]
    is_nearest: bool
    pads_neighbors: bool
    padding: int
    align_corners: bool


def _sample_backward(
    grad_output: Tensor,
    image: Tensor,
    grid: Tensor,
    mode: int,
    padding: int,
    align_corners: bool,
    output_mask: Sequence[bool],
    *,
    dims: int,
) -> tuple[Tensor | None, Tensor]:
    """Return the gradients of ``grid_sample`` with respect to its input and its grid."""
    require(
        image.dim() == grid.dim() == dims + 2,
        grid.shape[-1] == dims,
        grid.shape[0] == image.shape[0],
        grad_output.shape == (*image.shape[:2], *grid.shape[1:-1]),
        image.dtype == grid.dtype == grad_output.dtype,
        image.is_floating_point(),
        0 not in image.shape[2:],
        # torch samples volumes without the bicubic mode.
        mode in (_BILINEAR, _NEAREST, _BICUBIC)[: 5 - dims],
        padding in {_ZEROS, _BORDER, _REFLECTION},
    )
    batch, channels, *sizes = image.shape
    outputs, places = prod(grid.shape[1:-1]), prod(sizes)
    rule = Rule(_NEIGHBORS[mode], mode == _NEAREST, mode == _BICUBIC, padding, align_corners)
    integer = torch.int32 if places < INT32_LIMIT else torch.int64
    # One key and one weight for each neighbor of each sample, which all channels share.
    taps = len(rule.neighbors) ** dims
    index = grid.new_empty((taps, batch, outputs), dtype=integer)
    weights = torch.empty_like(index, dtype=accumulation_dtype(image.dtype))
    given = [part.contiguous() for part in (grid, image, grad_output)]
    grad_grid = torch.empty_like(given[0])
    if index.numel():
        more = (*given, index, weights, rule)
        run_kernel("kernels:sample", _sample, _make_example, grad_grid, *more)
    # The grid's gradient comes from the same kernel, but the image's needs a second one.
    if not output_mask[0]:
        return None, grad_grid
    layout = Layout(taps, batch, channels, outputs, 1, places, (batch * outputs, outputs, 1, 0))
    pieces = plan_pieces(image.dtype, outputs * taps)
    grad_image = torch.empty_like(given[1])
    accumulate(grad_image, index, given[2], weights, layout, pieces, include=False)
    return grad_image, grad_grid


grid_sampler_2d_backward = partial(_sample_backward, dims=2)
grid_sampler_3d_backward = partial(_sample_backward, dims=3)


def cudnn_grid_sampler_backward(
    self: Tensor, grid: Tensor, grad_output: Tensor
) -> tuple[Tensor | None, Tensor]:
    """Return what cuDNN computes: bilinear, zeros outside, corners aligned."""
    return _sample_backward(grad_output, self, grid, _BILINEAR, _ZEROS, True, (True, True), dims=2)  # noqa: FBT003 - an argument of torch's


def _sample(
    grad_grid: Tensor,
    grid: Tensor,
    image: Tensor,
    grad_output: Tensor,
    index: Tensor,
    weights: Tensor,
    rule: Rule,
) -> None:
    """Write the gradient with respect to the grid, and the neighbors of each sample.

    Args:
        grad_grid: The gradient.
        grid: Of shape ``[batch, *outputs, sides]``, as its gradient is.
        image: Of shape ``[batch, channels, *sizes]``.
        grad_output: Of shape ``[batch, channels, *outputs]``.
        index: The positions of the neighbors in their plane, of shape ``[neighbors, batch, n]``;
            that after the last one if outside.
        weights: Their weights, in the dtype to compute in.
        rule: How a sample is taken.
    """
    dims, sizes = grid.shape[-1], image.shape[2:]
    coordinates = grid.reshape(*index.shape[1:], dims).to(weights.dtype)
    factors = list[tuple[Tensor, Tensor]]()
    position = torch.zeros_like(coordinates[..., 0], dtype=torch.int64)
    inside = torch.ones_like(position, dtype=torch.bool)
    for side, size in enumerate(sizes):
        # Products of these views have one element for each neighbor. The grid's first coordinate
        # runs along the input's last dimension.
        view = (*[1] * side, -1, *[1] * (dims - 1 - side), *index.shape[1:])
        own = _find_neighbors(coordinates[..., -1 - side], size, rule)
        place, weight, slope = (part.view(view) for part in own)
        inside = inside & (place >= 0) & (place < size)
        position = position * size + place
        factors.append((weight, slope))
    index.copy_(torch.where(inside, position, prod(sizes)).view(index.shape))
    weights.copy_(reduce(mul, [weight for weight, _ in factors]).view(index.shape))
    if rule.is_nearest:
        grad_grid.zero_()
        return
    here = torch.where(inside, position, 0).view(index.shape)
    match = _match_pixels(image, grad_output, here, weights.dtype)
    slopes = []
    for side in reversed(range(dims)):  # in the order of the grid's coordinates
        # The weights of all dimensions but this one, of which the slope counts.
        change = reduce(mul, [both[number == side] for number, both in enumerate(factors)])
        terms = torch.where(inside.view(index.shape), match * change.view(index.shape), 0)
        slopes.append(sum(terms, torch.zeros_like(terms[0])))
    grad_grid.copy_(torch.stack(slopes, dim=-1).view(grad_grid.shape))


def _match_pixels(image: Tensor, grad_output: Tensor, index: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sum over channels of each neighbor times the gradient of its sample."""
    match = torch.zeros_like(index, dtype=dtype)
    pixels, gradients = image.flatten(2), grad_output.flatten(2).to(dtype)
    # Channel by channel, as the Triton kernel adds: a sum of torch's has another order.
    for channel in range(image.shape[1]):
        read = pixels[:, channel].expand(len(index), -1, -1).gather(2, index)
        match = match + read.to(dtype) * gradients[:, channel]
    return match


def _find_neighbors(coordinate: Tensor, size: int, rule: Rule) -> tuple[Tensor, Tensor, Tensor]:
    """Return the neighbors of each sample along a dimension, ``[neighbors, batch, n]``.

    Returns:
        Their places, possibly outside of the input; their weights; the derivatives of the weights
        by the grid's coordinate.
    """
    rate = size - 1 if rule.align_corners else size
    position = ((coordinate + 1) * rate - (0 if rule.align_corners else 1)) * 0.5
    slope = torch.full_like(position, rate * 0.5)
    if not rule.pads_neighbors:
        position, slope = _pad(position, slope, size, rule)
    # torch rounds half to even, too.
    base = position.round() if rule.is_nearest else position.floor()
    after, places, weights, slopes = position - base, [], [], []
    for offset, factors in rule.neighbors:
        place, weight, change = base + offset, torch.zeros_like(after), torch.zeros_like(after)
        # Horner's scheme, for the polynomial and its derivative.
        for factor in factors:
            weight, change = weight * after + factor, change * after + weight
        places.append(_pad(place, slope, size, rule)[0] if rule.pads_neighbors else place)
        weights.append(weight)
        slopes.append(change * slope)
    return torch.stack(places).to(torch.int64), torch.stack(weights), torch.stack(slopes)


def _pad(position: Tensor, slope: Tensor, size: int, rule: Rule) -> tuple[Tensor, Tensor]:
    """Move positions inside as the padding says, and return them with their slopes."""
    if rule.padding == _REFLECTION:
        low, span = (0.0, size - 1) if rule.align_corners else (-0.5, size)
        if span == 0:
            position, slope = torch.zeros_like(position), torch.zeros_like(slope)
        else:
            distance = position - low
            slope = torch.where(distance < 0, -slope, slope)
            # In float64 the rest is exact below 2^53 turns; beyond them torch defines no position.
            # A tensor: CUDA multiplies by the reciprocal of a number.
            wide = distance.abs().to(torch.float64)
            turns = (wide / torch.full_like(wide, span)).floor()
            rest = wide - turns * span
            is_less = rest < 0  # the quotient was rounded up
            turns = torch.where(is_less, turns - 1, turns)
            rest = torch.where(is_less, rest + span, rest).to(position.dtype)
            even = (turns * 0.5).floor() * 2 == turns
            position = torch.where(even, rest + low, span - rest + low)
            slope = torch.where(even, slope, -slope)
    if rule.padding != _ZEROS:
        # A NaN keeps its slope, as in torch.
        beyond = (position <= 0) | (position >= size - 1)
        slope = torch.where(beyond, 0, slope)
        # clamp keeps a NaN, and the comparison below moves it outside.
        position = position.clamp(0, size - 1)
    return torch.where(position.abs() <= _FARTHEST, position, _OUTSIDE), slope


def _make_example(device: torch.device) -> tuple[object, ...]:
    """Return arguments of :func:`_sample`: a bicubic sample with reflections."""
    pixels = (torch.arange(90, dtype=torch.float32, device="cpu") * 0.37).sin()
    grid = (torch.arange(44, dtype=torch.float32, device="cpu") * 0.61).cos() * 3
    given = (grid.view(1, 2, 11, 2), pixels.view(1, 3, 5, 6), pixels[:66].view(1, 3, 2, 11))
    index = torch.zeros(16, 1, 22, dtype=torch.int32, device=device)
    rule = Rule(_NEIGHBORS[_BICUBIC], False, True, _REFLECTION, False)  # noqa: FBT003 - fields
    grid, image, gradient = (part.to(device) for part in given)
    return torch.zeros_like(grid), grid, image, gradient, index, index.float(), rule
