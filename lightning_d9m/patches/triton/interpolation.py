# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: ANN001, ANN201, ANN202, D417, N803, PLR0913, PLR0917 - Triton's compiler reads these signatures
# ruff: noqa: PLR2004, SIM108 - formulas of torch; conditional expressions are evaluated twice
"""Gradients of interpolation: each input reads the outputs that it contributed to.

The outputs of an input are computed from its coordinates: the first one is estimated and then
corrected with the arithmetic of the forward pass, because a rounding error may move it by one. The
weights and their order are those of the torch ops in ``kernels/interpolation.py``.

In the antialiased modes an output has a filter. One launch adds up the weights of each filter along
each dimension, by which they are divided.
"""

from collections.abc import Sequence
from math import ceil, frexp

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
from lightning_d9m.patches.triton.launch import allocate, encode_float, launch_blocks

# The antialiasing filters come first, by their radius.
TRIANGLE, KEYS, LANCZOS, LINEAR, CUBIC = (tl.constexpr(mode) for mode in range(1, 6))
_MODES = {"triangle": TRIANGLE, "keys": KEYS, "lanczos": LANCZOS, "linear": LINEAR, "cubic": CUBIC}
_PI = tl.constexpr(3.141592653589793)
_PRECISE = 20  # bits of a coordinate with which float32 misses a position by less than one


@triton.jit
def decode_float(bits, like):
    """Return a float that was passed by its bits, in the dtype of a tensor."""
    if like.dtype == tl.float64:
        number = bits.to(tl.int64).to(tl.float64, bitcast=True)
    else:
        number = bits.to(tl.float32, bitcast=True)
    return number


@triton.jit
def _find_source(output, step, like, ALIGNED: tl.constexpr):
    """Return the position in the input that an output reads."""
    if ALIGNED:
        source = output.to(like.dtype) * step
    else:
        source = (output.to(like.dtype) + 0.5) * step - 0.5
    return source


@triton.jit
def _find_base(output, inputs, step, like, MODE: tl.constexpr, ALIGNED: tl.constexpr):
    """Return the neighbor before the position that an output reads, and the position."""
    source = _find_source(output, step, like, ALIGNED)
    if MODE == LINEAR:
        source = tl.maximum(source, 0)
        base = tl.minimum(source.to(output.dtype), inputs - 1)
    else:
        base = tl.floor(source).to(output.dtype)
    return base, source


@triton.jit
def _find_filter(output, inputs, step, like, MODE: tl.constexpr):
    """Return first input, end, center, widening and half the width of an antialiasing filter."""
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
def _find_first(
    place,
    outputs,
    inputs,
    step,
    like,
    MODE: tl.constexpr,
    ALIGNED: tl.constexpr,
    MARGIN: tl.constexpr,
):
    """Return the first output that may read an input."""
    if MODE < LINEAR:
        _start, _end, _center, _shrink, support = _find_filter(place, inputs, step, like, MODE)
        reads_start = place < 0
        estimate = (place.to(like.dtype) + 0.5 - support) / step - 0.5
    else:
        wanted = place - (1 if MODE == LINEAR else 2)
        reads_start = wanted < (1 if MODE == LINEAR else 0)
        if ALIGNED:
            estimate = wanted.to(like.dtype) / step
        else:
            estimate = (wanted.to(like.dtype) + 0.5) / step - 0.5
    last = (outputs - 1).to(like.dtype)
    estimate = tl.minimum(tl.maximum(tl.ceil(estimate), 0), last)
    first = tl.where(reads_start, 0, tl.where(step > 0, estimate, 0)).to(place.dtype)
    first = tl.maximum(first - MARGIN, 0)
    for _ in range(2 * MARGIN):
        if MODE < LINEAR:
            _start, end, _center, _shrink, _support = _find_filter(first, inputs, step, like, MODE)
            is_before = end <= place
        else:
            base, _source = _find_base(first, inputs, step, like, MODE, ALIGNED)
            is_before = base < wanted
        first += (is_before & (first < outputs)).to(place.dtype)
    return tl.where(step > 0, tl.where(reads_start, 0, first), 0)


@triton.jit
def weigh_inner(distance, A: tl.constexpr):
    """Return the weight of cubic convolution at a distance of 0 to 1."""
    return ((A + 2) * distance - (A + 3)) * distance * distance + 1


@triton.jit
def weigh_outer(distance, A: tl.constexpr):
    """Return the weight of cubic convolution at a distance of 1 to 2."""
    return ((A * distance - 5 * A) * distance + 8 * A) * distance - 4 * A


@triton.jit
def _weigh(
    output,
    place,
    outputs,
    inputs,
    numbers,
    step,
    totals,
    like,
    MODE: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Return the weight of an input in an output, and whether the output reads the input."""
    if MODE < LINEAR:
        start, filter_end, center, shrink, _support = _find_filter(output, inputs, step, like, MODE)
        inside = (start <= place) & (place < filter_end)
        total = tl.load(totals + (numbers[1] + output), mask=inside & (output < outputs), other=1)
        weight = divide_float(_weigh_filter(place, center, shrink, like, MODE), total)
    else:
        base, source = _find_base(output, inputs, step, like, MODE, ALIGNED)
        after = source - base.to(like.dtype)
        before = 1 - after
        zero = after * 0
        end = inputs - 1
        if MODE == LINEAR:
            left = base == place
            right = tl.minimum(base + 1, end) == place
            weight = tl.where(left, before, zero) + tl.where(right, after, zero)
            inside = left | right
        else:
            first = tl.minimum(tl.maximum(base - 1, 0), end) == place
            second = tl.minimum(tl.maximum(base, 0), end) == place
            third = tl.minimum(tl.maximum(base + 1, 0), end) == place
            fourth = tl.minimum(tl.maximum(base + 2, 0), end) == place
            weight = tl.where(first, weigh_outer(after + 1, -0.75), zero)
            weight += tl.where(second, weigh_inner(after, -0.75), zero)
            weight += tl.where(third, weigh_inner(before, -0.75), zero)
            weight += tl.where(fourth, weigh_outer(before + 1, -0.75), zero)
            inside = first | second | third | fourth
    return weight, inside & (output < outputs)


@triton.jit(do_not_specialize=["sizes", "outputs", "steps", "strides", "elements"])
def add_weighted(
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
    ALIGNED: tl.constexpr,
    MARGIN: tl.constexpr,
    RANKS_D: tl.constexpr,
    RANKS_H: tl.constexpr,
    RANKS_W: tl.constexpr,
):
    """Write for each input the weighted sum of the gradients of the outputs that read it.

    ``launch_gradient`` describes the other arguments.

    Args:
        steps: For each spatial dimension the bits of the distance of two outputs, in inputs, and
            the position of its sums in ``totals``.
        totals: What ``sum_filters`` writes, for the antialiased modes.
        MODE: LINEAR, CUBIC, or the radius of an antialiasing filter.
        ALIGNED: Whether the corners of input and output are aligned.
        MARGIN: The greatest error of the first estimate of an output.
    """
    offsets, exists = find_block(elements, BLOCK, WIDE)
    batch, channel, depth, height, width = find_coordinates(offsets, sizes, DIMS, CHANNELS_LAST)
    plane = batch * strides[0] + channel * strides[1]
    total = make_zeros(gradient, BLOCK)
    step_d = decode_float(steps[0][0], total)
    step_h = decode_float(steps[1][0], total)
    step_w = decode_float(steps[2][0], total)
    n_d = sizes[1][0]
    n_h = sizes[2][0]
    n_w = sizes[3][0]
    first_d = depth
    first_h = height
    if DIMS > 2:
        first_d = _find_first(depth, outputs[0], n_d, step_d, total, MODE, ALIGNED, MARGIN)
    if DIMS > 1:
        first_h = _find_first(height, outputs[1], n_h, step_h, total, MODE, ALIGNED, MARGIN)
    first_w = _find_first(width, outputs[2], n_w, step_w, total, MODE, ALIGNED, MARGIN)
    for rank_d in range(RANKS_D):
        d = first_d + rank_d
        in_d = exists
        by_d = total
        if DIMS > 2:
            by_d, in_d = _weigh(
                d, depth, outputs[0], n_d, steps[0], step_d, totals, total, MODE, ALIGNED
            )
        total_h = make_zeros(gradient, BLOCK)
        for rank_h in range(RANKS_H):
            h = first_h + rank_h
            in_h = exists
            by_h = total
            if DIMS > 1:
                by_h, in_h = _weigh(
                    h, height, outputs[1], n_h, steps[1], step_h, totals, total, MODE, ALIGNED
                )
            total_w = make_zeros(gradient, BLOCK)
            for rank_w in range(RANKS_W):
                w = first_w + rank_w
                by_w, in_w = _weigh(
                    w, width, outputs[2], n_w, steps[2], step_w, totals, total, MODE, ALIGNED
                )
                place = plane + d * strides[2] + h * strides[3] + w * strides[4]
                inside = exists & in_d & in_h & in_w
                read = tl.load(gradient + place, mask=inside, other=0).to(total.dtype)
                total_w += tl.where(inside, read * by_w, 0)
            if DIMS > 1:
                total_w = tl.where(in_h, total_w * by_h, 0)
            total_h += total_w
        if DIMS > 2:
            total_h = tl.where(in_d, total_h * by_d, 0)
        total += total_h
    tl.store(result + offsets, total.to(result.dtype.element_ty), mask=exists)


def count_reads(sizes: tuple[int, int], step: float, width: float, *, align_corners: bool) -> int:
    """Return the most outputs that read one input.

    Args:
        sizes: The numbers of inputs and of outputs.
        step: The distance of two outputs, in inputs.
        width: The number of inputs that an output reads.
        align_corners: Whether output 0 is at input 0, else their borders are aligned.
    """
    inputs, outputs = sizes
    if step <= 0:
        return outputs
    # With a power of two as the step, all positions are exact.
    slack = (frexp(step)[0] != 0.5) + (outputs >> _PRECISE)
    shift = 0.0 if align_corners else 0.5
    # All outputs behind the end read the last input.
    behind = outputs - ceil((inputs - 1 - width / 2 + shift) / step - shift)
    return min(max(ceil(width / step), behind) + slack, outputs)


def resampled(
    grad_output: Tensor,
    input_size: Sequence[int],
    steps: Sequence[float],
    align_corners: bool,
    mode: str,
    memory_format: torch.memory_format,
) -> Tensor:
    """Return the gradient of an interpolation.

    A step is the distance of two outputs, in inputs. The mode is ``"linear"``, ``"cubic"``, or a
    filter, which is never aligned: ``"triangle"``, ``"keys"``, ``"lanczos"``.
    """
    outputs = tuple(grad_output.shape[-len(steps) :])
    dtype = torch.float64 if grad_output.dtype == torch.float64 else torch.float32
    bits = tuple(encode_float(step, dtype) for step in steps)
    code = _MODES[mode].value
    filtered = code < LINEAR.value
    aligned = align_corners and not filtered
    totals: Tensor | int = 0
    # Outputs up to half an input before the first one read it, and its neighbor with weight 0.
    widths = [4.0 if mode == "cubic" else 2.0 if aligned else 2.5] * len(steps)
    if filtered:
        widths = [2 * code * max(step, 1.0) for step in steps]
        totals = allocate([sum(outputs)], torch.empty(0, dtype=dtype, device=grad_output.device))
        taps = max(ceil(width / 2) * 2 + 1 for width in widths)
        launch_blocks(
            sum_filters, totals, totals, tuple(input_size), outputs, bits, MODE=code, TAPS=taps
        )
    sizes = zip(input_size, outputs, strict=True)
    return launch_gradient_of_lines(
        add_weighted,
        grad_output,
        input_size,
        [
            Side((bit, sum(outputs[:dim])), count_reads(size, step, width, align_corners=aligned))
            for dim, (bit, size, step, width) in enumerate(
                zip(bits, sizes, steps, widths, strict=True)
            )
        ],
        neutral=(encode_float(1.0, dtype), 0),
        memory_format=memory_format,
        extra=[totals],
        MODE=code,
        ALIGNED=aligned,
        # Of an estimate in float32.
        MARGIN=1 + (max(outputs) >> _PRECISE),
    )
