# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: ANN001, ANN201, N803, SIM108 - Triton's compiler reads these signatures
"""Coordinates in Triton kernels whose programs each write a block of input gradients.

An op with one or two spatial dimensions is computed as one with three, whose first ones have the
size 1.
"""

import triton
import triton.language as tl


@triton.jit
def find_block(elements, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    """Return the offsets that this program writes to, and which of them exist."""
    first = tl.program_id(0)
    if WIDE:
        first = first.to(tl.int64)
    offsets = first * BLOCK + tl.arange(0, BLOCK)
    return offsets, offsets < elements


@triton.jit
def divide_index(number, divisor):
    """Divide a number from 0 by one that all programs share.

    A division of integers takes many instructions, a multiplication few. In 64 bits, which only
    large tensors need, the number is divided.
    ``divisor`` is what ``input_gradient.as_divisor`` returns: the divisor, a factor and a shift.
    """
    if number.dtype == tl.int64:
        quotient = number // divisor[0]
    else:
        factor = divisor[1].to(tl.uint32, bitcast=True).to(tl.uint64)
        product = number.to(tl.uint32, bitcast=True).to(tl.uint64) * factor
        quotient = (product >> divisor[2].to(tl.uint64)).to(tl.int32)
    return quotient


@triton.jit
def find_coordinates(offsets, sizes, DIMS: tl.constexpr, CHANNELS_LAST: tl.constexpr):
    """Return batch, channel, depth, height and width of offsets into a dense result.

    ``sizes`` are channels, depth, height and width, as divisors.
    """
    channel = offsets * 0
    depth = channel
    height = channel
    if CHANNELS_LAST:
        above = divide_index(offsets, sizes[0])
        channel = offsets - above * sizes[0][0]
        offsets = above
    above = divide_index(offsets, sizes[3])
    width = offsets - above * sizes[3][0]
    offsets = above
    if DIMS > 1:
        above = divide_index(offsets, sizes[2])
        height = offsets - above * sizes[2][0]
        offsets = above
    if DIMS > 2:  # noqa: PLR2004 - a number of dimensions
        above = divide_index(offsets, sizes[1])
        depth = offsets - above * sizes[1][0]
        offsets = above
    batch = offsets
    if not CHANNELS_LAST:
        batch = divide_index(offsets, sizes[0])
        channel = offsets - batch * sizes[0][0]
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
def divide_float(dividend, divisor):
    """Divide with one rounding; the operator ``/`` is less exact in float32."""
    if dividend.dtype != tl.float64:
        quotient = tl.div_rn(dividend, divisor)
    else:
        quotient = dividend / divisor
    return quotient


@triton.jit
def find_strided_window(place, rank, outputs, window, DILATED: tl.constexpr):
    """Return the window of a given rank among those around an input, and whether it contains it.

    Args:
        place: The input's coordinate.
        rank: From 0; windows ascend with it.
        outputs: The number of windows.
        window: Size, stride as a divisor, padding and dilation.
        DILATED: Whether the dilation differs from 1 in some dimension. Ranks then count the
            elements of a window from its last one, else they count windows.
    """
    stride = window[1]
    if DILATED:
        reach = place + window[2] - (window[0] - 1 - rank) * window[3]
        output = divide_index(tl.maximum(reach, 0), stride)
        inside = (reach >= 0) & (output * stride[0] == reach)
    else:
        output = (
            divide_index(tl.maximum(place + window[2] - window[0] + stride[0], 0), stride) + rank
        )
        inside = output * stride[0] <= place + window[2]
    return output, inside & (output < outputs)


@triton.jit
def find_adaptive_window(place, rank, outputs, inputs):
    """Return the window of a given rank among those of an adaptive pooling that contain an input.

    Window ``o`` is ``[o * inputs // outputs, ceil((o + 1) * inputs / outputs))``.
    ``inputs`` is a divisor; the rest is as in ``find_strided_window``.
    """
    output = divide_index(place * outputs, inputs) + rank
    return output, output * inputs[0] < (place + 1) * outputs


@triton.jit
def find_fractional_window(place, rank, outputs, window):
    """Return the window of a given rank among those that may contain an input, and if it may.

    Window ``o`` starts at ``trunc((o + u) * step) - trunc(u * step)``, where ``u`` is random and
    ``step = (inputs - size) / (outputs - 1)``: less than 2 from ``o * step``, whatever ``u`` is.
    ``window`` is the size, and ``inputs - size`` (1 if it is 0) as a divisor.
    """
    steps = outputs - 1
    span = window[1]
    output = divide_index(tl.maximum(place - window[0] - 1, 0) * steps + span[0] - 1, span) + rank
    return output, (output * span[0] <= (place + 2) * steps) & (output < outputs)
