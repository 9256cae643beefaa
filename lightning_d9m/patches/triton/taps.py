# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: ANN001, ANN002, ANN201, ANN202, N803, PLR0913, PLR0917 - Triton's compiler reads these functions
"""The kernel of ``patches/taps.py``: one thread adds the taps of an input, in ascending order."""

from functools import lru_cache

import triton
import triton.language as tl

from lightning_d9m.patches.triton.launch import Launch, needs_int64


@triton.jit(do_not_specialize=["inputs", "outputs", "inner", "elements"])
def apply_taps(
    source,
    out,
    begins,
    places,
    weights,
    inputs,
    outputs,
    inner,
    elements,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write into each input the weighted sum of its outputs, along the dimension in the middle."""
    first = tl.program_id(0)
    if WIDE:
        first = first.to(tl.int64)
    element = first * BLOCK + tl.arange(0, BLOCK)
    mask = element < elements
    line = element // inner
    side = line % inputs
    begin = tl.load(begins + side, mask=mask, other=0)
    number = tl.load(begins + side + 1, mask=mask, other=0) - begin
    row = (line // inputs) * outputs
    total = tl.zeros([BLOCK], weights.dtype.element_ty)
    for turn in range(tl.max(number)):
        here = turn < number
        place = tl.load(places + begin + turn, mask=here, other=0).to(element.dtype)
        weight = tl.load(weights + begin + turn, mask=here, other=0.0)
        value = tl.load(source + (row + place) * inner + element % inner, mask=here, other=0.0)
        total = tl.where(here, total + value.to(total.dtype) * weight, total)
    tl.store(out + element, total.to(out.dtype.element_ty), mask=mask)


@lru_cache(maxsize=4096)
def _prepare(outer, inputs, outputs, inner, *_dtypes):
    elements = outer * inputs * inner
    wide = needs_int64(elements, outer * outputs * inner)
    return Launch(apply_taps, elements, inputs, outputs, inner, elements, wide)


def apply(out, source, taps, outer, inner):
    """Write into ``out`` the weighted sums of ``source``, along the dimension in the middle."""
    begins, outputs, weights = taps.begins, taps.outputs, taps.weights
    sizes = (outer, begins.numel() - 1, taps.size, inner)
    launch = _prepare(*sizes, source.dtype, out.dtype, weights.dtype)
    launch(source, out, begins, outputs, weights)
