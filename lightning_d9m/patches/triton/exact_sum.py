# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: ANN001, ANN201, ANN202, FBT003, N803, N806, PLR0913, PLR0917, PLR2004 - Triton's compiler reads these functions
"""Kernels of the sums of ``patches/kernels/exact_sum.py``, which has the definition.

Three launches: the outputs get the keys of their own values, the terms raise them by atomic maxima,
and then add integers to the limbs by 64-bit atomic additions. Integers add up and compare alike in
any order. The last launch rounds each output once.
"""

import torch
import triton
import triton.language as tl

from lightning_d9m.patches.triton.geometry import find_block
from lightning_d9m.patches.triton.launch import allocate, launch_blocks, needs_int64


@triton.jit
def split_float(value, COUNT: tl.constexpr):
    """Returns the sign, the significand and the key of numbers, in float64 for three limbs."""
    FRACTION: tl.constexpr = 52 if COUNT == 3 else 23
    EXPONENT: tl.constexpr = 11 if COUNT == 3 else 8
    if COUNT == 3:
        bits = value.to(tl.float64).to(tl.int64, bitcast=True)
    else:
        bits = value.to(tl.float32).to(tl.int32, bitcast=True).to(tl.int64)
    field = ((bits >> FRACTION) & ((1 << EXPONENT) - 1)).to(tl.int32)
    fraction = bits & ((1 << FRACTION) - 1)
    significand = tl.where(field > 0, fraction + (1 << FRACTION), fraction)
    zero = tl.where(bits < 0, 1, 2)
    key = tl.where(significand > 0, tl.maximum(field, 1) + 2, zero)
    is_nan = (field == (1 << EXPONENT) - 1) & (fraction > 0)
    return bits < 0, significand, key + is_nan.to(tl.int32)


@triton.jit
def cut(negative, significand, key, top, limb: tl.constexpr, width, guard, COUNT: tl.constexpr):
    """Returns what a term adds to one limb of an output whose greatest key is ``top``."""
    INF: tl.constexpr = 2049 if COUNT == 3 else 257
    shift = top - key + (limb * width - guard)
    right = tl.minimum(tl.maximum(shift, 0), 63).to(tl.int64)
    left = tl.minimum(tl.maximum(-shift, 0), 63).to(tl.int64)
    digit = (significand >> right) << left
    if limb < COUNT - 1:
        digit &= (tl.full([], 1, tl.int64) << width) - 1
    digit = tl.where(negative, -digit, digit)
    counted = (key == INF) & (limb < 2)
    counted &= negative if limb == 1 else ~negative
    return tl.where(top >= INF, counted.to(tl.int64), digit)


@triton.jit
def add_term(value, place, mask, keys, sums, slots, width, guard, COUNT: tl.constexpr):
    """Adds a term to the limbs of its output."""
    negative, significand, key = split_float(value, COUNT)
    top = tl.load(keys + place, mask=mask, other=0)
    pointer = sums + place
    for limb in tl.static_range(COUNT):
        digit = cut(negative, significand, key, top, limb, width, guard, COUNT)
        tl.atomic_add(pointer, digit, mask=mask & (digit != 0), sem="relaxed")
        pointer += slots


@triton.jit
def raise_key(value, place, mask, keys, COUNT: tl.constexpr):
    """Raises the key of an output to that of a term."""
    _, _, key = split_float(value, COUNT)
    # Keys only grow: what was read, perhaps too early, spares most atomics and changes no result.
    known = tl.load(keys + place, mask=mask, other=0)
    tl.atomic_max(keys + place, key, mask=mask & (key > known), sem="relaxed")


@triton.jit
def locate_terms(
    index, count, rows, inner, elements, BLOCK, PER_ELEMENT: tl.constexpr, WIDE: tl.constexpr
):
    """Returns the elements of a block, the output that each belongs to, and which have one."""
    element, mask = find_block(elements, BLOCK, WIDE)
    column = element % inner
    line = element // inner
    row = line % rows
    if PER_ELEMENT:
        key = tl.load(index + element, mask=mask, other=-1)
    else:
        key = tl.load(index + row, mask=mask, other=-1)
    mask &= (key >= 0) & (key < count)
    return element, ((line // rows) * count + key.to(element.dtype)) * inner + column, mask


@triton.jit
def begin(
    out, keys, sums, elements, INCLUDE: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr
):
    """Sets the keys of outputs to those of their own values, and their limbs to 0."""
    element, mask = find_block(elements, BLOCK, True)
    key = tl.full([BLOCK], 0, tl.int32)
    if INCLUDE:
        _, _, key = split_float(tl.load(out + element, mask=mask, other=0.0), COUNT)
    tl.store(keys + element, key, mask=mask)
    pointer = sums + element
    for _ in tl.static_range(COUNT):
        tl.store(pointer, tl.full([BLOCK], 0, tl.int64), mask=mask)
        pointer += elements


@triton.jit
def raise_keys(
    values,
    index,
    keys,
    count,
    rows,
    inner,
    elements,
    COUNT: tl.constexpr,
    PER_ELEMENT: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Raises the keys of outputs to those of their terms."""
    element, place, mask = locate_terms(
        index, count, rows, inner, elements, BLOCK, PER_ELEMENT, WIDE
    )
    raise_key(tl.load(values + element, mask=mask, other=0.0), place, mask, keys, COUNT)


@triton.jit
def add_terms(
    values,
    index,
    keys,
    sums,
    count,
    rows,
    inner,
    slots,
    width,
    guard,
    elements,
    COUNT: tl.constexpr,
    PER_ELEMENT: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Adds the terms to the limbs of their outputs."""
    element, place, mask = locate_terms(
        index, count, rows, inner, elements, BLOCK, PER_ELEMENT, WIDE
    )
    value = tl.load(values + element, mask=mask, other=0.0)
    add_term(value, place, mask, keys, sums, slots, width, guard, COUNT)


@triton.jit
def _shift_right(high, low, by):
    """Returns the lower 64 bits of 128 bits, shifted by less than 128; all but ``by`` unsigned."""
    few = tl.minimum(by, 63).to(tl.uint64)
    rest = tl.minimum(tl.maximum(64 - by, 0), 63).to(tl.uint64)
    within = tl.where(by > 0, (low >> few) | (high << rest), low)
    beyond = high >> tl.minimum(tl.maximum(by - 64, 0), 63).to(tl.uint64)
    return tl.where(by < 64, within, beyond)


@triton.jit
def _count_bits(word):
    count = tl.zeros_like(word).to(tl.int32)
    for step in tl.static_range(6):
        size = 32 >> step
        upper = word >> size
        count = tl.where(upper != 0, count + size, count)
        word = tl.where(upper != 0, upper, word)
    return count + (word != 0).to(tl.int32)


@triton.jit
def _drop(high, low, by):
    """Returns 128 bits without the lowest ``by``, rounded to nearest with ties to even."""
    before = tl.maximum(by - 1, 0)
    whole = _shift_right(high, low, before)
    few = tl.minimum(before, 63).to(tl.uint64)
    many = tl.minimum(tl.maximum(before - 64, 0), 63).to(tl.uint64)
    tail = tl.where(
        before < 64,
        (whole << few) != low,
        (low != 0) | (((high >> many) << many) != high),
    )
    up = ((whole & 1) != 0) & (tail | ((whole & 2) != 0))
    left = tl.minimum(tl.maximum(-by, 0), 63).to(tl.uint64)
    return tl.where(by > 0, (whole >> 1) + up.to(tl.uint64), low << left)


@triton.jit
def _join(first, second, third, width):
    """Returns the upper and the lower 64 bits of limbs, and whether they stand for a negative."""
    one = tl.full([], 1, tl.int64)
    carried = first >> width
    low = (first & ((one << width) - 1)).to(tl.uint64, bitcast=True)
    second += carried
    third += second >> width
    middle = (second & ((one << width) - 1)).to(tl.uint64, bitcast=True)
    upper = third.to(tl.uint64, bitcast=True)
    shift = width.to(tl.uint64)
    low |= middle << shift
    high = middle >> (64 - shift)
    twice = 2 * width
    below = tl.minimum(twice, 63).to(tl.uint64)
    low = tl.where(twice < 64, low | (upper << below), low)
    above = tl.maximum(twice - 64, 0).to(tl.uint64)
    short = tl.minimum(tl.maximum(64 - twice, 0), 63).to(tl.uint64)
    return high | tl.where(twice < 64, upper >> short, upper << above), low, third < 0


@triton.jit
def round_sum(
    first,
    second,
    third,
    top,
    width,
    guard,
    COUNT: tl.constexpr,
    FRACTION: tl.constexpr,
    EXPONENT: tl.constexpr,
    SIGNED: tl.constexpr,
):
    """Returns the bits of the numbers that the limbs stand for, as int64 without a sign extension.

    Of two limbs, ``third`` has the sign of the second. ``top`` is the greatest key of the terms.
    """
    SOURCE: tl.constexpr = 52 if COUNT == 3 else 23
    INF: tl.constexpr = 2049 if COUNT == 3 else 257
    BIAS: tl.constexpr = 1023 if COUNT == 3 else 127
    LAST: tl.constexpr = 2 - (1 << (EXPONENT - 1)) - FRACTION
    LARGEST: tl.constexpr = (1 << EXPONENT) - 3
    INFINITY: tl.constexpr = ((1 << EXPONENT) - 1) << FRACTION
    ups = first > 0
    downs = second > 0
    high, low, negative = _join(first, second, third, width)
    sign = tl.where(negative, -1, 1).to(tl.int64)
    high, low, _ = _join(first * sign, second * sign, third * sign, width)
    length = tl.where(high != 0, 64 + _count_bits(high), _count_bits(low))
    unit = top - (2 + BIAS + SOURCE) - guard
    by = tl.maximum(length - (FRACTION + 1), LAST - unit)
    kept = _drop(high, low, by).to(tl.int64, bitcast=True)
    field = unit + by - LAST
    bits = (tl.minimum(tl.maximum(field, 0), LARGEST).to(tl.int64) << FRACTION) + kept
    bits = tl.where(field > LARGEST, INFINITY, bits)
    zero = (high | low) == 0
    bits = tl.where(zero, 0, bits)
    negative = tl.where(zero, (top == 1) & SIGNED, negative)
    bits = tl.where(top >= INF, INFINITY, bits)
    bits = tl.where(
        (top > INF) | ((top == INF) & ups & downs), INFINITY + (1 << (FRACTION - 1)), bits
    )
    negative = tl.where(top >= INF, downs & ~ups & (top == INF), negative)
    return bits | (negative.to(tl.int64) << (FRACTION + EXPONENT))


@triton.jit
def finish(
    out,
    keys,
    sums,
    width,
    guard,
    elements,
    INCLUDE: tl.constexpr,
    COUNT: tl.constexpr,
    FRACTION: tl.constexpr,
    EXPONENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Writes the sums into the outputs."""
    element, mask = find_block(elements, BLOCK, True)
    width += tl.full([BLOCK], 0, tl.int64)
    top = tl.load(keys + element, mask=mask, other=0)
    pointer = sums + element
    first = tl.load(pointer, mask=mask, other=0)
    second = tl.load(pointer + elements, mask=mask, other=0)
    if COUNT == 3:
        third = tl.load(pointer + elements + elements, mask=mask, other=0)
    else:
        third = tl.zeros_like(second)
    size: tl.constexpr = tl.int16 if FRACTION < 23 else (tl.int32 if FRACTION == 23 else tl.int64)
    if INCLUDE:
        start = tl.load(out + element, mask=mask, other=0.0)
        negative, significand, key = split_float(start, COUNT)
        first += cut(negative, significand, key, top, 0, width, guard, COUNT)
        second += cut(negative, significand, key, top, 1, width, guard, COUNT)
        if COUNT == 3:
            third += cut(negative, significand, key, top, 2, width, guard, COUNT)
        mask &= key <= (2049 if COUNT == 3 else 257)  # a NaN keeps its bits
    bits = round_sum(first, second, third, top, width, guard, COUNT, FRACTION, EXPONENT, INCLUDE)
    tl.store(out + element, bits.to(size).to(out.dtype.element_ty, bitcast=True), mask=mask)


def begin_sums(out, limbs, *, include):
    """Return the keys and the limbs of the outputs, with ``include`` the keys of their values."""
    keys = allocate((out.numel(),), torch.empty(0, dtype=torch.int32, device=out.device))
    sums = allocate(
        (limbs.number * out.numel(),), torch.empty(0, dtype=torch.int64, device=out.device)
    )
    launch_blocks(begin, out, out, keys, sums, INCLUDE=include, COUNT=limbs.number)
    return keys, sums


def finish_sums(out, keys, sums, limbs, form, *, include):
    """Write the sums into the outputs."""
    layout = {"COUNT": limbs.number, "FRACTION": form.fraction, "EXPONENT": form.exponent}
    launch_blocks(finish, out, out, keys, sums, limbs.width, limbs.guard, INCLUDE=include, **layout)


def accumulate(out, index, values, limbs, form, *, include):
    """Write into each output the sum of the values whose index names it."""
    keys, sums = begin_sums(out, limbs, include=include)
    if values.numel():
        where = {
            "PER_ELEMENT": index.dim() > 1,
            "WIDE": needs_int64(values, sums),
            "COUNT": limbs.number,
        }
        shape = (out.shape[1], values.shape[1], out.shape[2])
        launch_blocks(raise_keys, values, values, index, keys, *shape, **where)
        layout = (out.numel(), limbs.width, limbs.guard)
        launch_blocks(add_terms, values, values, index, keys, sums, *shape, *layout, **where)
    finish_sums(out, keys, sums, limbs, form, include=include)
