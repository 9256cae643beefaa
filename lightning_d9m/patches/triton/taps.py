# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: ANN001, ANN002, ANN201, ANN202, N803, PLR0913, PLR0917 - Triton's compiler reads these functions
"""The kernel of ``kernels/separable.py``: one thread adds the taps of an input, in order."""

from functools import lru_cache

import triton
import triton.language as tl

from lightning_d9m.patches.triton.launch import Launch, needs_int64

_SIZES = ["depth", "height", "width", "planes", "lines", "columns", "inner", "elements"]


@triton.jit
def read_range(begins, side, mask):
    """Return the position of an input's first tap, and the number of its taps."""
    begin = tl.load(begins + side, mask=mask, other=0)
    return begin, tl.load(begins + side + 1, mask=mask, other=0) - begin


@triton.jit(do_not_specialize=_SIZES)
def apply_taps(
    source,
    out,
    begins,
    places,
    weights,
    depth,
    height,
    width,
    planes,
    lines,
    columns,
    inner,
    elements,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write into each input the weighted sum of its outputs, along three adjacent dimensions.

    A dimension of one input and one output has one tap, of weight 1. Of the tables those of the
    dimensions follow each other.
    """
    first = tl.program_id(0)
    if WIDE:
        first = first.to(tl.int64)
    element = first * BLOCK + tl.arange(0, BLOCK)
    mask = element < elements
    rest = element // inner
    x = rest % width
    y = rest // width % height
    z = rest // width // height % depth
    outer = rest // width // height // depth
    begin_z, number_z = read_range(begins, z, mask)
    begin_y, number_y = read_range(begins + depth + 1, y, mask)
    begin_x, number_x = read_range(begins + depth + height + 2, x, mask)
    total = tl.zeros([BLOCK], weights.dtype.element_ty)
    for turn_z in range(tl.max(number_z)):
        tap_z = begin_z + turn_z
        here_z = turn_z < number_z
        plane = outer * planes + tl.load(places + tap_z, mask=here_z, other=0)
        plane_sum = tl.zeros([BLOCK], total.dtype)
        for turn_y in range(tl.max(number_y)):
            tap_y = begin_y + turn_y
            here_y = here_z & (turn_y < number_y)
            line = plane * lines + tl.load(places + tap_y, mask=here_y, other=0)
            line_sum = tl.zeros([BLOCK], total.dtype)
            for turn_x in range(tl.max(number_x)):
                tap_x = begin_x + turn_x
                here = here_y & (turn_x < number_x)
                place = line * columns + tl.load(places + tap_x, mask=here, other=0)
                value = tl.load(source + place * inner + element % inner, mask=here, other=0.0)
                weight = tl.load(weights + tap_x, mask=here, other=0.0)
                line_sum = tl.where(here, line_sum + value.to(total.dtype) * weight, line_sum)
            weight = tl.load(weights + tap_y, mask=here_y, other=0.0)
            plane_sum = tl.where(here_y, plane_sum + line_sum * weight, plane_sum)
        weight = tl.load(weights + tap_z, mask=here_z, other=0.0)
        total = tl.where(here_z, total + plane_sum * weight, total)
    tl.store(out + element, total.to(out.dtype.element_ty), mask=mask)


@lru_cache(maxsize=4096)
def _prepare(outer, inputs, outputs, inner, *_dtypes):
    (depth, height, width), (planes, lines, columns) = inputs, outputs
    elements = outer * depth * height * width * inner
    is_large = needs_int64(elements, outer * planes * lines * columns * inner)
    numbers = (*inputs, *outputs, inner, elements, is_large)
    return Launch(apply_taps, elements, *numbers, wide=False)


def apply(out, source, taps, outer, inner):
    """Write into ``out`` the weighted sums of ``source``, along the dimensions of the taps."""
    dtypes = (source.dtype, out.dtype, taps.weights.dtype)
    launch = _prepare(outer, taps.inputs, taps.outputs, inner, *dtypes)
    launch(source, out, taps.begins, taps.places, taps.weights)
