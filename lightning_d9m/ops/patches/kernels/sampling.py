"""Gradients of ``grid_sample``: what each sample read, and with which weight.

A thread computes the neighbors of a sample and its gradient with respect to the grid. The gradient
with respect to the input is an exact sum over the samples. Coordinates and weights follow torch's
``GridSampler.h``.
"""

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_d9m.ops.patches.exact_sums import Layout, accumulate, plan_pieces
from lightning_d9m.ops.patches.registration import accumulation_dtype, require
from lightning_d9m.ops.patches.triton.launch import INT32_LIMIT, run_kernel

# torch's numbers of the modes and of the paddings.
_BILINEAR, _NEAREST, _BICUBIC = 0, 1, 2
_ZEROS, _BORDER, _REFLECTION = 0, 1, 2
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
        run_kernel("kernels:sample", _make_example, grad_grid, *more)
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


def _make_example(device: torch.device) -> tuple[object, ...]:
    """Return arguments of the kernel: a bicubic sample with reflections."""
    pixels = (torch.arange(90, dtype=torch.float32, device="cpu") * 0.37).sin()
    grid = (torch.arange(44, dtype=torch.float32, device="cpu") * 0.61).cos() * 3
    given = (grid.view(1, 2, 11, 2), pixels.view(1, 3, 5, 6), pixels[:66].view(1, 3, 2, 11))
    index = torch.zeros(16, 1, 22, dtype=torch.int32, device=device)
    rule = Rule(_NEIGHBORS[_BICUBIC], False, True, _REFLECTION, False)  # noqa: FBT003 - fields
    grid, image, gradient = (part.to(device) for part in given)
    return torch.zeros_like(grid), grid, image, gradient, index, index.float(), rule
