# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: ANN001, ANN201, N803 - Triton's compiler reads these signatures
"""Coordinates in Triton kernels whose programs each write a block of input gradients.

An op with one or two spatial dimensions is computed as one with three, whose first ones have the
size 1.
"""

import triton
import triton.language as tl


@triton.jit
def find_block(elements, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    """Return the offsets that this program writes to, and which of them exist.

    Args:
        elements: The number of elements of the result.
        BLOCK: The number of elements that a program writes.
        WIDE: Whether an offset may exceed 32 bits.
    """
    first = tl.program_id(0)
    if WIDE:
        first = first.to(tl.int64)
    offsets = first * BLOCK + tl.arange(0, BLOCK)
    return offsets, offsets < elements


@triton.jit
def find_coordinates(offsets, sizes, DIMS: tl.constexpr, CHANNELS_LAST: tl.constexpr):
    """Return batch, channel, depth, height and width of offsets into a dense result.

    Args:
        offsets: Counted in elements.
        sizes: Channels, depth, height and width.
        DIMS: The number of spatial dimensions.
        CHANNELS_LAST: Whether the channels are the last dimension in memory.
    """
    channel = offsets * 0
    depth = channel
    height = channel
    if CHANNELS_LAST:
        channel = offsets % sizes[0]
        offsets = offsets // sizes[0]
    width = offsets % sizes[3]
    offsets = offsets // sizes[3]
    if DIMS > 1:
        height = offsets % sizes[2]
        offsets = offsets // sizes[2]
    if DIMS > 2:  # noqa: PLR2004 - a number of dimensions
        depth = offsets % sizes[1]
        offsets = offsets // sizes[1]
    batch = offsets
    if not CHANNELS_LAST:
        channel = offsets % sizes[0]
        batch = offsets // sizes[0]
    return batch, channel, depth, height, width


@triton.jit
def make_zeros(like, BLOCK: tl.constexpr):
    """Return zeros in float64 for pointers to float64, else in float32."""
    if like.dtype.element_ty == tl.float64:
        zeros = tl.zeros([BLOCK], tl.float64)
    else:
        zeros = tl.zeros([BLOCK], tl.float32)
    return zeros


@triton.jit
def find_strided_window(place, rank, outputs, window, DILATED: tl.constexpr):
    """Return the window of a given rank among those around an input, and whether it contains it.

    Args:
        place: The input's coordinate.
        rank: From 0; windows ascend with it.
        outputs: The number of windows.
        window: Size, stride, padding and dilation.
        DILATED: Whether the dilation differs from 1 in some dimension. Ranks then count the
            elements of a window from its last one, else they count windows.
    """
    if DILATED:
        reach = place + window[2] - (window[0] - 1 - rank) * window[3]
        output = tl.maximum(reach, 0) // window[1]
        inside = (reach >= 0) & (output * window[1] == reach)
    else:
        output = tl.maximum(place + window[2] - window[0] + window[1], 0) // window[1] + rank
        inside = output * window[1] <= place + window[2]
    return output, inside & (output < outputs)


@triton.jit
def find_adaptive_window(place, rank, outputs, inputs):
    """Return the window of a given rank among those of an adaptive pooling that contain an input.

    Window ``o`` is ``[o * inputs // outputs, ceil((o + 1) * inputs / outputs))``.
    """
    output = place * outputs // inputs + rank
    return output, output * inputs < (place + 1) * outputs


@triton.jit
def find_fractional_window(place, rank, outputs, inputs, size):
    """Return the window of a given rank among those that may contain an input, and if it may.

    Window ``o`` starts at ``trunc((o + u) * step) - trunc(u * step)``, where ``u`` is random and
    ``step = (inputs - size) / (outputs - 1)``: less than 2 from ``o * step``, whatever ``u`` is.
    """
    span = tl.maximum(inputs - size, 0)
    steps = outputs - 1
    first = (tl.maximum(place - size - 1, 0) * steps + span - 1) // tl.maximum(span, 1)
    output = tl.where(span > 0, first, 0) + rank
    return output, (output * span <= (place + 2) * steps) & (output < outputs)
