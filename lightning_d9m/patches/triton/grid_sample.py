# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: ANN001, ANN201, ANN202, FBT003, N803, N806, PLR0913, PLR0917, PLR2004 - Triton's compiler reads these functions
"""Kernels of the gradients of ``grid_sample``; ``patches/kernels/grid_sample.py`` has the formulas.

The gradient of the image is an exact sum (see ``exact_sum.py``): one launch raises the keys of the
image's elements, one adds to them. The gradient of the grid is formed by one thread for each
sample, channel after channel and neighbor after neighbor.
"""

import torch
import triton
import triton.language as tl

from lightning_d9m.patches.triton.exact_sum import (
    add_term,
    begin_sums,
    finish_sums,
    raise_key,
)
from lightning_d9m.patches.triton.geometry import divide_float, find_block
from lightning_d9m.patches.triton.interpolation import weigh_inner, weigh_outer
from lightning_d9m.patches.triton.launch import allocate

_BLOCK = 128  # samples of a program
_PROGRAMS = 4096  # enough to occupy a device; beyond it, a program goes through several channels
_MOST_GROUPS = 65535  # programs along the second axis of a grid

BICUBIC = tl.constexpr(2)
NEAREST = tl.constexpr(1)
REFLECTION = tl.constexpr(2)
CUBIC = tl.constexpr(-0.75)


@triton.jit
def _pad(position, slope, size, PADDING: tl.constexpr, CORNERS: tl.constexpr):
    """Moves positions inside as the padding says; returns them with their slopes."""
    last = (size - 1).to(position.dtype)
    if PADDING == REFLECTION:
        low = 0.0 if CORNERS else -0.5
        span = last if CORNERS else size.to(position.dtype)
        distance = position - low
        turned = tl.where(distance < 0, -slope, slope)
        distance = tl.abs(distance)
        flips = tl.floor(divide_float(distance, span))
        rest = distance - flips * span
        before = rest < 0
        flips = tl.where(before, flips - 1, flips)
        rest = tl.where(before, rest + span, rest)
        even = tl.floor(flips * 0.5) * 2 == flips
        slope = tl.where(span == 0, 0.0, tl.where(even, turned, -turned))
        position = tl.where(span == 0, 0.0, tl.where(even, rest + low, span - rest + low))
    if PADDING != 0:
        is_nan = position != position  # noqa: PLR0124 - a NaN
        inside = (position > 0) & (position < last)
        slope = tl.where(inside | is_nan, slope, 0.0)
        position = tl.where(is_nan, position, tl.minimum(tl.maximum(position, 0.0), last))
    # No integer is as great as the others, or a NaN.
    return tl.where(tl.abs(position) < 2147483647.0, position, -100.0), slope


@triton.jit
def _slope_inner(distance):
    return (3 * (CUBIC + 2) * distance - 2 * (CUBIC + 3)) * distance


@triton.jit
def _slope_outer(distance):
    return (3 * CUBIC * distance - 10 * CUBIC) * distance + 8 * CUBIC


@triton.jit
def _find_tap(
    coordinate,
    size,
    TAP: tl.constexpr,
    MODE: tl.constexpr,
    PADDING: tl.constexpr,
    CORNERS: tl.constexpr,
):
    """Returns the place, the weight and the slope of a neighbor along one dimension."""
    width = size.to(coordinate.dtype)
    if CORNERS:
        last = (size - 1).to(coordinate.dtype)
        position = (coordinate + 1) * 0.5 * last
        rate = last * 0.5
    else:
        position = ((coordinate + 1) * width - 1) * 0.5
        rate = width * 0.5
    slope = tl.zeros_like(position) + rate
    if MODE == BICUBIC:
        base = tl.floor(position)
        after = position - base
        before = 1 - after
        if TAP == 0:
            weight = weigh_outer(after + 1, CUBIC)
            change = _slope_outer(after + 1)
        elif TAP == 1:
            weight = weigh_inner(after, CUBIC)
            change = _slope_inner(after)
        elif TAP == 2:
            weight = weigh_inner(before, CUBIC)
            change = -_slope_inner(before)
        else:
            weight = weigh_outer(before + 1, CUBIC)
            change = -_slope_outer(before + 1)
        place, _ = _pad(base + (TAP - 1), slope, size, PADDING, CORNERS)
        slope = change * slope
        place = place.to(tl.int64)
    else:
        position, slope = _pad(position, slope, size, PADDING, CORNERS)
        base = tl.floor(position)
        if MODE == NEAREST:
            part = position - base
            odd = tl.floor(base * 0.5) * 2 != base
            up = (part > 0.5) | ((part == 0.5) & odd)
            place = tl.where(up, base + 1, base).to(tl.int64)
            weight = tl.full(position.shape, 1.0, position.dtype)
            slope = tl.zeros_like(position)
        elif TAP == 0:
            place = base.to(tl.int64)
            weight = base + 1 - position
            slope = -slope
        else:
            place = base.to(tl.int64) + 1
            weight = position - base
    return place, weight, slope


@triton.jit
def _locate(grid, samples, SIZE: tl.constexpr, DIMS: tl.constexpr, DTYPE: tl.constexpr):
    """Returns the samples of a block, a mask of those that exist, and their coordinates."""
    sample, mask = find_block(samples, SIZE, True)
    x = tl.load(grid + sample * DIMS, mask=mask, other=0.0).to(DTYPE)
    y = tl.load(grid + sample * DIMS + 1, mask=mask, other=0.0).to(DTYPE)
    z = x
    if DIMS == 3:
        z = tl.load(grid + sample * DIMS + 2, mask=mask, other=0.0).to(DTYPE)
    return sample, mask, x, y, z


@triton.jit
def _find_corner(
    x,
    y,
    z,
    depth,
    height,
    width,
    CORNER: tl.constexpr,
    DIMS: tl.constexpr,
    TAPS: tl.constexpr,
    MODE: tl.constexpr,
    PADDING: tl.constexpr,
    CORNERS: tl.constexpr,
):
    """Returns the place and the weight of a corner, whether it is there, and the slopes."""
    column, by_x, change_x = _find_tap(x, width, CORNER % TAPS, MODE, PADDING, CORNERS)
    row, by_y, change_y = _find_tap(y, height, CORNER // TAPS % TAPS, MODE, PADDING, CORNERS)
    inside = (column >= 0) & (column < width) & (row >= 0) & (row < height)
    if DIMS == 2:
        place = row * width + column
        weight = by_y * by_x
        slope_x = by_y * change_x
        slope_y = change_y * by_x
        slope_z = slope_y
    else:
        # Factors in the order of the dimensions, as the torch ops multiply them.
        layer, by_z, change_z = _find_tap(z, depth, CORNER // TAPS // TAPS, MODE, PADDING, CORNERS)
        inside &= (layer >= 0) & (layer < depth)
        place = (layer * height + row) * width + column
        weight = by_z * by_y * by_x
        slope_x = by_z * by_y * change_x
        slope_y = by_z * change_y * by_x
        slope_z = change_z * by_y * by_x
    return place, weight, inside, slope_x, slope_y, slope_z


@triton.jit(do_not_specialize=["depth", "height", "width"])
def scatter_samples(
    grad,
    grid,
    keys,
    sums,
    channels,
    outputs,
    depth,
    height,
    width,
    bits,
    guard,
    group,
    samples,
    ADD: tl.constexpr,
    DIMS: tl.constexpr,
    TAPS: tl.constexpr,
    MODE: tl.constexpr,
    PADDING: tl.constexpr,
    CORNERS: tl.constexpr,
    COUNT: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Raises the keys of the image's elements, or adds to them what each sample contributes."""
    DTYPE: tl.constexpr = tl.float64 if COUNT == 3 else tl.float32
    sample, mask, x, y, z = _locate(grid, samples, SIZE, DIMS, DTYPE)
    batch = sample // outputs
    output = sample % outputs
    elements = depth.to(tl.int64) * height * width
    slots = (samples // outputs) * channels * elements
    first = tl.program_id(1) * group
    for channel in range(first, tl.minimum(first + group, channels)):
        plane = batch * channels + channel
        gradient = tl.load(grad + plane * outputs + output, mask=mask, other=0.0).to(DTYPE)
        for corner in tl.static_range(TAPS**DIMS):
            place, weight, inside, _, _, _ = _find_corner(
                x, y, z, depth, height, width, corner, DIMS, TAPS, MODE, PADDING, CORNERS
            )
            slot = plane * elements + place
            value = weight * gradient
            if ADD:
                add_term(value, slot, mask & inside, keys, sums, slots, bits, guard, COUNT)
            else:
                raise_key(value, slot, mask & inside, keys, COUNT)


@triton.jit(do_not_specialize=["depth", "height", "width"])
def differentiate_grid(
    result,
    grad,
    image,
    grid,
    channels,
    outputs,
    depth,
    height,
    width,
    samples,
    DIMS: tl.constexpr,
    TAPS: tl.constexpr,
    MODE: tl.constexpr,
    PADDING: tl.constexpr,
    CORNERS: tl.constexpr,
    DOUBLE: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Writes the gradient of the grid."""
    DTYPE: tl.constexpr = tl.float64 if DOUBLE else tl.float32
    sample, mask, x, y, z = _locate(grid, samples, SIZE, DIMS, DTYPE)
    batch = sample // outputs
    output = sample % outputs
    elements = depth.to(tl.int64) * height * width
    by_x = tl.zeros_like(x)
    by_y = tl.zeros_like(x)
    by_z = tl.zeros_like(x)
    for channel in range(channels):
        plane = batch * channels + channel
        gradient = tl.load(grad + plane * outputs + output, mask=mask, other=0.0).to(DTYPE)
        for corner in tl.static_range(TAPS**DIMS):
            place, _, inside, slope_x, slope_y, slope_z = _find_corner(
                x, y, z, depth, height, width, corner, DIMS, TAPS, MODE, PADDING, CORNERS
            )
            pixel = tl.load(image + plane * elements + place, mask=mask & inside, other=0.0)
            match = pixel.to(DTYPE) * gradient
            by_x += tl.where(inside, match * slope_x, 0.0)
            by_y += tl.where(inside, match * slope_y, 0.0)
            if DIMS == 3:
                by_z += tl.where(inside, match * slope_z, 0.0)
    tl.store(result + sample * DIMS, by_x.to(result.dtype.element_ty), mask=mask)
    tl.store(result + sample * DIMS + 1, by_y.to(result.dtype.element_ty), mask=mask)
    if DIMS == 3:
        tl.store(result + sample * DIMS + 2, by_z.to(result.dtype.element_ty), mask=mask)


def differentiate(grad_output, image, grid, mode, padding, corners, limbs, form, *, by_image):
    """Return the gradient of the image, or None without ``by_image``, and that of the grid."""
    channels, dims = image.shape[1], image.dim() - 2
    grad_output, image, grid = (part.contiguous() for part in (grad_output, image, grid))
    samples = grid.numel() // dims
    sizes = (channels, samples // image.shape[0], *(1, *image.shape[2:])[-3:])
    constants = {
        "DIMS": dims,
        "TAPS": {0: 2, 1: 1, 2: 4}[mode],
        "MODE": mode,
        "PADDING": padding,
        "CORNERS": corners,
        "SIZE": _BLOCK,
        "num_warps": 4,
        "enable_fp_fusion": False,
    }
    blocks = -(-samples // _BLOCK)
    by_grid = torch.zeros_like(grid) if mode == 1 else allocate(grid.shape, grid)
    with torch.cuda.device(image.device if image.is_cuda else -1):
        if mode != 1:
            double = image.dtype == torch.float64
            differentiate_grid[(blocks,)](
                by_grid, grad_output, image, grid, *sizes, samples, DOUBLE=double, **constants
            )
        if not by_image:
            return None, by_grid
        out = allocate(image.shape, image, torch.contiguous_format)
        keys, sums = begin_sums(out, limbs, include=False)
        group = max(-(-channels * blocks // _PROGRAMS), -(-channels // _MOST_GROUPS))
        group = min(group, channels)
        for add in (False, True):
            scatter_samples[(blocks, -(-channels // group))](
                grad_output,
                grid,
                keys,
                sums,
                *sizes,
                limbs.width,
                limbs.guard,
                group,
                samples,
                ADD=add,
                COUNT=limbs.number,
                **constants,
            )
        finish_sums(out, keys, sums, limbs, form, include=False)
    return out, by_grid
