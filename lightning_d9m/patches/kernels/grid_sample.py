"""Gradients of ``grid_sample`` in 2 and 3 dimensions.

torch's CUDA kernel starts one thread per output and adds into the input with atomics. Here the
contributions to an element of the input are added exactly; see ``exact_sums``. Coordinates and
weights follow torch's ``GridSampler.h``.
"""

from collections.abc import Sequence
from functools import partial, reduce
from itertools import product
from math import prod

import torch
from torch import Tensor

from lightning_d9m.patches.exact_sums import Layout, accumulate, plan_pieces
from lightning_d9m.patches.registration import accumulation_dtype, require
from lightning_d9m.patches.triton.launch import INT32_LIMIT, allocate

_BILINEAR, _NEAREST, _BICUBIC = 0, 1, 2
_ZEROS, _BORDER, _REFLECTION = 0, 1, 2
_OUTSIDE = -100.0  # torch's position for coordinates that no integer can represent
_CUBIC = -0.75  # the parameter of torch's cubic convolution
_WEIGHTS: dict[int, list[tuple[int, tuple[float, ...]]]] = {
    # The offset of each neighbor, and the coefficients of the polynomial that is its weight.
    _NEAREST: [(0, (1,))],
    _BILINEAR: [(0, (-1, 1)), (1, (1, 0))],
    _BICUBIC: [
        (-1, (_CUBIC, -2 * _CUBIC, _CUBIC, 0)),
        (0, (_CUBIC + 2, -_CUBIC - 3, 0, 1)),
        (1, (-_CUBIC - 2, 2 * _CUBIC + 3, -_CUBIC, 0)),
        (2, (-_CUBIC, _CUBIC, 0, 0)),
    ],
}


Tap = tuple[Tensor, Tensor, Tensor]
"""One neighbor that a sample reads along one dimension: the element, possibly outside of the input,
its weight, and the derivative of the weight by the grid's coordinate; of shape ``[n, outputs]``."""


def _backward(
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
        mode in (_BILINEAR, _NEAREST, _BICUBIC)[: 5 - dims],
        padding in {_ZEROS, _BORDER, _REFLECTION},
    )
    batch, channels, *sizes = image.shape
    outputs = prod(grid.shape[1:-1])
    dtype = accumulation_dtype(image.dtype)
    coordinates = grid.reshape(batch, outputs, len(sizes)).to(dtype)
    taps = [
        # The grid's first coordinate runs along the input's last dimension.
        _find_taps(coordinates[..., -1 - side], size, mode, padding, align_corners)
        for side, size in enumerate(sizes)
    ]
    gradients, corners = grad_output.reshape(batch, channels, outputs), list(product(*taps))
    integer = torch.int32 if prod(sizes) < INT32_LIMIT else torch.int64
    index = torch.stack([_find_place(corner, sizes).to(integer) for corner in corners])
    sloped = [] if mode == _NEAREST else corners
    grad_grid = _differentiate_grid(image, gradients, sloped, index, dims)
    grad_grid = grad_grid.to(grid.dtype).view(grid.shape)
    if not output_mask[0]:
        return None, grad_grid
    weights = torch.stack([_multiply([weight for _, weight, _ in corner]) for corner in corners])
    tap, sample, output = index.stride()
    steps = (tap, sample, output, 0)
    layout = Layout(len(corners), batch, channels, outputs, 1, prod(sizes), steps)
    grad_image = allocate(image, image.shape)
    pieces = plan_pieces(image.dtype, outputs * len(corners))
    terms = (index, gradients.contiguous(), weights)
    accumulate(grad_image, *terms, layout, pieces, include=False)
    return grad_image, grad_grid


grid_sampler_2d_backward = partial(_backward, dims=2)
grid_sampler_3d_backward = partial(_backward, dims=3)


def cudnn_grid_sampler_backward(
    self: Tensor, grid: Tensor, grad_output: Tensor
) -> tuple[Tensor | None, Tensor]:
    """Return what cuDNN computes: bilinear, zeros outside, corners aligned."""
    return _backward(grad_output, self, grid, _BILINEAR, _ZEROS, True, (True, True), dims=2)  # noqa: FBT003 - an argument of torch's


def _differentiate_grid(
    image: Tensor, gradients: Tensor, corners: Sequence[Sequence[Tap]], index: Tensor, dims: int
) -> Tensor:
    """Return the gradient with respect to the grid, of shape ``[batch, outputs, sides]``."""
    pixels = image.flatten(2)
    slopes = [torch.zeros_like(index[0], dtype=accumulation_dtype(image.dtype))] * dims
    for corner, place in zip(corners, index, strict=False):
        inside = place < pixels.shape[2]
        here = torch.where(inside, place, 0).to(torch.int64).unsqueeze(1).expand_as(gradients)
        match = (pixels.gather(2, here).to(slopes[0].dtype) * gradients).sum(1)
        for side, (_, _, slope) in enumerate(corner):
            factors = [weight for _, weight, _ in corner]
            factors[side] = slope
            slopes[side] = slopes[side] + torch.where(inside, match * _multiply(factors), 0)
    return torch.stack(slopes[::-1], dim=-1)


def _find_place(corner: Sequence[Tap], sizes: Sequence[int]) -> Tensor:
    """Return the position of one neighbor of each output; that after the last one if outside."""
    place, inside = torch.zeros_like(corner[0][0]), torch.ones_like(corner[0][0] > 0)
    for (along, _, _), size in zip(corner, sizes, strict=True):
        inside = inside & (along >= 0) & (along < size)
        place = place * size + along
    return torch.where(inside, place, prod(sizes))


def _find_taps(
    coordinate: Tensor, size: int, mode: int, padding: int, align_corners: bool
) -> list[Tap]:
    rate = size - 1 if align_corners else size
    position = ((coordinate + 1) * rate - (0 if align_corners else 1)) / 2
    slope = torch.full_like(position, rate / 2)
    if mode != _BICUBIC:
        position, slope = _pad(position, slope, size, padding, align_corners)
    base = position.round() if mode == _NEAREST else position.floor()
    after, taps = position - base, []
    for offset, factors in _WEIGHTS[mode]:
        place, weight, change = base + offset, torch.zeros_like(after), torch.zeros_like(after)
        for factor in factors:
            weight, change = weight * after + factor, change * after + weight
        if mode == _BICUBIC:
            place, _ = _pad(place, slope, size, padding, align_corners)
        taps.append((place.to(torch.int64), weight, change * slope))
    return taps


def _pad(
    position: Tensor, slope: Tensor, size: int, padding: int, align_corners: bool
) -> tuple[Tensor, Tensor]:
    """Move positions inside as the padding says, and return them with their slopes."""
    if padding == _REFLECTION:
        low, span = (0.0, float(size - 1)) if align_corners else (-0.5, float(size))
        if span == 0:
            position, slope = torch.zeros_like(position), torch.zeros_like(slope)
        else:
            distance = position - low
            slope = torch.where(distance < 0, -slope, slope)
            distance = distance.abs()
            rest = distance.fmod(span)  # exactly
            even = ((distance - rest) / span).round().fmod(2) == 0
            position = torch.where(even, rest + low, span - rest + low)
            slope = torch.where(even, slope, -slope)
    if padding != _ZEROS:
        inside = (position > 0) & (position < size - 1)
        # A NaN keeps its slope, as in torch.
        slope = torch.where(inside | position.isnan(), slope, 0)
        position = position.clamp(0, size - 1)
    representable = (position.abs() < INT32_LIMIT) & position.isfinite()
    return torch.where(representable, position, _OUTSIDE), slope


_multiply = partial(reduce, torch.mul)
