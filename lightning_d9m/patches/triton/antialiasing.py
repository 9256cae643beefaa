# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: ANN001, ANN201, ANN202, D417, N803, PLR0913, PLR0917 - Triton's compiler reads these signatures
# ruff: noqa: PLR2004 - formulas of torch
"""Gradients of antialiased interpolation: each input reads the outputs whose filters contain it.

One launch adds up the weights of each filter along each dimension, by which they are divided; the
next one reads the outputs, as in interpolation.py.
"""

from collections.abc import Sequence
from math import ceil

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_d9m.patches.triton.geometry import (
    divide_float,
    find_block,
    find_coordinates,
    make_zeros,
)
from lightning_d9m.patches.triton.input_gradient import Side, launch_gradient_of_lines
from lightning_d9m.patches.triton.interpolation import (
    count_reads,
    decode_float,
    find_margin,
    weigh_inner,
    weigh_outer,
)
from lightning_d9m.patches.triton.launch import allocate, encode_float, launch_blocks

TRIANGLE, KEYS, LANCZOS = (tl.constexpr(radius) for radius in (1, 2, 3))
_PI = tl.constexpr(3.141592653589793)


@triton.jit
def _find_filter(output, inputs, step, like, MODE: tl.constexpr):
    """Return the first input and the end of an antialiasing filter, its center and its widening."""
    shrink = tl.maximum(step, 1)  # the filter widens where the image shrinks
    support = shrink * MODE
    center = (output.to(like.dtype) + 0.5) * step
    # Conversion to an integer truncates toward zero, as in C++.
    start = tl.maximum((center - support + 0.5).to(output.dtype), 0)
    end = tl.minimum((center + support + 0.5).to(output.dtype), inputs)
    return start, end, center, shrink, support


@triton.jit
def _sinc(distance):
    angle = distance * _PI
    return tl.where(
        distance == 0, 1.0, divide_float(tl.sin(angle), tl.where(angle == 0, 1.0, angle))
    )


@triton.jit
def _weigh_filter(place, center, shrink, like, MODE: tl.constexpr):
    """Return the weight of an input before it is divided by the sum of a filter's weights."""
    distance = tl.abs(divide_float(place.to(like.dtype) - center + 0.5, shrink))
    if MODE == TRIANGLE:
        weight = tl.maximum(1 - distance, 0)
    elif MODE == KEYS:
        outer = tl.where(distance < 2, weigh_outer(distance, -0.5), 0)
        weight = tl.where(distance < 1, weigh_inner(distance, -0.5), outer)
    else:
        weight = tl.where(distance < 3, _sinc(distance) * _sinc(distance / 3), 0)
    return weight


@triton.jit(do_not_specialize=["sizes", "outputs", "steps", "elements"])
def sum_filters(
    totals,
    sizes,
    outputs,
    steps,
    elements,
    BLOCK: tl.constexpr,
    MODE: tl.constexpr,
    TAPS: tl.constexpr,
):
    """Write for each output the sum of the weights of its filter, first by rows, then by columns.

    Args:
        totals: The sums, float32 or float64.
        sizes: Height and width of the inputs.
        outputs: Height and width of the outputs.
        steps: The bits of the distance of two outputs, in inputs, along height and width.
        elements: The number of rows and columns.
        BLOCK: The number of sums of a program.
        MODE: TRIANGLE, KEYS or LANCZOS: the radius of the filter.
        TAPS: The greatest number of inputs in a filter.
    """
    offsets, exists = find_block(elements, BLOCK, False)  # noqa: FBT003
    total = make_zeros(totals, BLOCK)
    is_row = offsets < outputs[0]
    output = tl.where(is_row, offsets, offsets - outputs[0])
    inputs = tl.where(is_row, sizes[0], sizes[1])
    step = tl.where(is_row, decode_float(steps[0], total), decode_float(steps[1], total))
    start, end, center, shrink, _support = _find_filter(output, inputs, step, total, MODE)
    for tap in range(TAPS):
        place = start + tap
        weight = _weigh_filter(place, center, shrink, total, MODE)
        total += tl.where(place < end, weight, 0)
    tl.store(totals + offsets, total, mask=exists)


@triton.jit
def _find_first_filter(
    place, outputs, inputs, step, like, MODE: tl.constexpr, MARGIN: tl.constexpr
):
    """Return the first output whose filter may contain an input."""
    _start, _end, _center, _shrink, support = _find_filter(place, inputs, step, like, MODE)
    estimate = (place.to(like.dtype) + 0.5 - support) / step - 0.5
    last = (outputs - 1).to(like.dtype)
    estimate = tl.minimum(tl.maximum(tl.ceil(estimate), 0), last)
    first = tl.where(step > 0, estimate, 0).to(place.dtype)
    first = tl.maximum(first - MARGIN, 0)
    for _ in range(2 * MARGIN):
        _start, end, _center, _shrink, support = _find_filter(first, inputs, step, like, MODE)
        first += ((end <= place) & (first < outputs)).to(place.dtype)
    return first


@triton.jit
def _weigh_normalized(
    output, place, outputs, inputs, numbers, step, totals, like, MODE: tl.constexpr
):
    """Return the weight of an input in an output, and whether the output reads the input."""
    start, end, center, shrink, _support = _find_filter(output, inputs, step, like, MODE)
    inside = (start <= place) & (place < end) & (output < outputs)
    total = tl.load(totals + (numbers[1] + output), mask=inside, other=1)
    return divide_float(_weigh_filter(place, center, shrink, like, MODE), total), inside


@triton.jit(do_not_specialize=["sizes", "outputs", "steps", "strides", "elements"])
def add_filtered(
    gradient,
    result,
    sizes,
    outputs,
    steps,
    strides,
    totals,
    elements,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
    DIMS: tl.constexpr,
    CHANNELS_LAST: tl.constexpr,
    MODE: tl.constexpr,
    MARGIN: tl.constexpr,
    RANKS_D: tl.constexpr,
    RANKS_H: tl.constexpr,
    RANKS_W: tl.constexpr,
):
    """Write for each input the sum of the gradients of the outputs whose filters contain it.

    ``launch_gradient`` describes the other arguments.

    Args:
        steps: For each spatial dimension the bits of the distance of two outputs, in inputs, and
            the position of its sums in ``totals``.
        totals: What ``sum_filters`` writes.
        DIMS: The number of spatial dimensions: 1 or 2.
        MODE: TRIANGLE, KEYS or LANCZOS: the radius of the filter.
        MARGIN: The greatest error of the first estimate of an output.
        RANKS_D: 1.
        RANKS_H: The greatest number of outputs to read along the height.
        RANKS_W: Along the width.
    """
    tl.static_assert(RANKS_D == 1)
    offsets, exists = find_block(elements, BLOCK, WIDE)
    batch, channel, _depth, height, width = find_coordinates(offsets, sizes, DIMS, CHANNELS_LAST)
    plane = batch * strides[0] + channel * strides[1]
    total = make_zeros(gradient, BLOCK)
    step_h = decode_float(steps[1][0], total)
    step_w = decode_float(steps[2][0], total)
    n_h = sizes[2][0]
    n_w = sizes[3][0]
    first_w = _find_first_filter(width, outputs[2], n_w, step_w, total, MODE, MARGIN)
    first_h = height
    if DIMS > 1:
        first_h = _find_first_filter(height, outputs[1], n_h, step_h, total, MODE, MARGIN)
    for rank_h in range(RANKS_H):
        h = first_h + rank_h
        in_h = exists
        by_h = make_zeros(gradient, BLOCK)
        if DIMS > 1:
            by_h, in_h = _weigh_normalized(
                h, height, outputs[1], n_h, steps[1], step_h, totals, total, MODE
            )
        total_w = make_zeros(gradient, BLOCK)
        for rank_w in range(RANKS_W):
            w = first_w + rank_w
            by_w, in_w = _weigh_normalized(
                w, width, outputs[2], n_w, steps[2], step_w, totals, total, MODE
            )
            inside = exists & in_h & in_w
            place = plane + h * strides[3] + w * strides[4]
            read = tl.load(gradient + place, mask=inside, other=0).to(total.dtype)
            total_w += tl.where(inside, read * by_w, 0)
        if DIMS > 1:
            total_w = tl.where(in_h, total_w * by_h, 0)
        total += total_w
    tl.store(result + offsets, total.to(result.dtype.element_ty), mask=exists)


def resampled(
    grad_output: Tensor,
    input_size: Sequence[int],
    steps: Sequence[float],
    _align_corners: bool,
    mode: str,
    memory_format: torch.memory_format,
) -> Tensor:
    """Return the gradient of an antialiased interpolation in two dimensions.

    Args:
        grad_output: Of the output.
        input_size: The sizes of the input's spatial dimensions.
        steps: For each of them the distance of two outputs, in inputs.
        mode: The filter: ``"triangle"``, ``"keys"`` or ``"lanczos"``.
        memory_format: The memory format of the result.
    """
    radius = {"triangle": 1, "keys": 2, "lanczos": 3}[mode]
    outputs = tuple(grad_output.shape[2:])
    is_double = grad_output.dtype == torch.float64
    dtype = torch.float64 if is_double else torch.float32
    bits = [encode_float(step, dtype) for step in steps]
    widths = [2 * radius * max(step, 1.0) for step in steps]
    totals = allocate([sum(outputs)], torch.empty(0, dtype=dtype, device=grad_output.device))
    launch_blocks(
        sum_filters,
        totals,
        totals,
        tuple(input_size),
        outputs,
        tuple(bits),
        MODE=radius,
        TAPS=max(ceil(width / 2) * 2 + 1 for width in widths),
    )
    sides = [
        Side((bits[dim], first), count_reads(sizes, steps[dim], widths[dim], align_corners=False))
        for dim, first, sizes in zip(
            (0, 1), (0, outputs[0]), zip(input_size, outputs, strict=True), strict=True
        )
    ]
    return launch_gradient_of_lines(
        add_filtered,
        grad_output,
        input_size,
        sides,
        neutral=(encode_float(1.0, dtype), 0),
        memory_format=memory_format,
        extra=[totals],
        MODE=radius,
        MARGIN=find_margin(outputs),
    )
