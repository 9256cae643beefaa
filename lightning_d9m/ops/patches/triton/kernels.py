# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: ANN001, ANN002, ANN201, ANN202, N803, PLR0124, PLR0913, PLR0917, PLR2004 - Triton's compiler reads these functions
"""The kernels of ``exact_sums.py``, ``kernels/separable.py`` and ``sampling.py``: the same bits.

One thread adds the taps of an input, or computes a sample of an image. Of exact sums, the first
phase raises the exponent of each one to that of its greatest term, by maxima of 32-bit integers;
the second one cuts the terms and adds their pieces in float64; the last one rounds. No addition of
pieces rounds, and maxima compare, so the order of the threads has no effect. Each phase is a
launch.
"""

from functools import lru_cache
from math import prod

import torch

from lightning_d9m.ops.patches.triton import language as tl
from lightning_d9m.ops.patches.triton.launch import jit, prepare_launch


@jit()
def read_exponents(values):
    """Return the biased exponents of float64 numbers."""
    # The exponent has the 11 bits between the sign and the 52 bits of the significand.
    return ((tl.cast(values, tl.int64, bitcast=True) >> 52) & 0x7FF).to(tl.int32)


@jit()
def round_to(values, last):
    """Round float64 numbers to multiples of ``2**(last - 1023)``, by a constant."""
    # The last bit of 1.5 * 2**52 units is one unit, so that the addition rounds to units, and the
    # subtraction is exact. With 1.5 in place of 1 a negative number stays in the binary order of
    # the constant.
    exponents = tl.maximum(last + 52, 1).to(tl.int64)
    constant = tl.cast((exponents << 52) | (1 << 51), tl.float64, bitcast=True)
    return (values + constant) - constant


@jit()
def is_finite(values):
    """Return which float64 numbers are neither infinite nor NaN."""
    return read_exponents(values) < 0x7FF


_SIZES = ["steps_tap", "steps_batch", "steps_row", "steps_column", "terms", "slots", "count"]


@jit(*_SIZES, "rows", "inner", "group", "size")
def accumulate_terms(
    out, values, weights, index, sums,
    steps_tap, steps_batch, steps_row, steps_column, terms, slots, count, rows, inner, group, size,
    TAPS: tl.constexpr, PIECES: tl.constexpr, WEIGHTED: tl.constexpr, INCLUDE: tl.constexpr,
    BITS: tl.constexpr, LEAST: tl.constexpr, PHASE: tl.constexpr, WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Run a phase: 0 raises the exponents, 1 adds the pieces of the terms, 2 rounds the sums.

    The terms are the values times their weights, then what is in ``out``. The exponents follow the
    sums in memory. What atomics change is read from the L2 cache, where they change it.
    """
    tops = sums + slots.to(tl.int64) * PIECES
    tops = tl.cast(tops, tl.pointer_type(tl.int32), bitcast=True)
    program = tl.program_id(0)
    if WIDE:
        program = program.to(tl.int64)
        terms = terms.to(tl.int64)  # it may fit into 32 bits where the number of elements does not
    element = program * BLOCK + tl.arange(0, BLOCK)
    if PHASE == 2:
        round_sums(out, tops, sums, element, slots, PIECES, INCLUDE, BITS, LEAST)
    else:
        given = element < terms
        own = ~given & (element < terms + slots * INCLUDE)
        line = element // inner
        batch = line // rows
        # The strides of the index: it may be the same for each batch, channel or column.
        where = (batch // group) * steps_batch + (line % rows) * steps_row
        where += (element % inner) * steps_column
        value = tl.load(values + element, mask=given, other=0.0)
        kept = tl.load(out + (element - terms), mask=own, other=0.0)
        # Unrolled, so that the compiler drops the branch of the first tap from all others.
        for tap in tl.static_range(TAPS):
            key = tl.load(index + where, mask=given, other=-1).to(element.dtype)
            # Indices of torch may count from the end. A place behind the last one, as of a sample
            # outside an image, has no sum.
            key = tl.where(key < 0, key + count, key)
            mask = given & (key >= 0) & (key < count)
            term = weigh(value, weights, where, mask, WEIGHTED)
            place = (batch * count + key) * inner + element % inner
            if tap == 0:
                term = tl.where(own, kept.to(tl.float64), term)
                place = tl.where(own, element - terms, place)
                mask = mask | own
            # Half of a -0.0 is negative before the first exponent.
            top = tl.load(tops + place, mask=mask, other=0, cache_modifier=".cg")
            top = tl.maximum(top, 0)
            if PHASE == 0:
                raise_exponents(tops + place, term, top, mask)
            else:
                add_pieces(sums + place, term, top, mask, slots, size, PIECES)
            where += steps_tap


@jit()
def raise_exponents(tops, term, top, mask):
    """Raise exponents to those of terms."""
    # Exponents only grow: one that was read too early spares an atomic or not.
    exponent = read_exponents(term)
    tl.atomic_max(tops, exponent, mask=mask & (exponent > top), sem="relaxed")


@jit()
def weigh(value, weights, where, mask, WEIGHTED: tl.constexpr):
    """Return values in float64, times their weights."""
    if WEIGHTED:
        weight = tl.load(weights + where, mask=mask, other=0.0)
        value = value.to(weight.dtype) * weight
    return value.to(tl.float64)


@jit()
def add_pieces(sums, term, top, mask, slots, size, PIECES: tl.constexpr):
    """Add the pieces of terms to the sums of pieces, which are ``slots`` apart."""
    # An infinity has the exponent 2047; 2046 is that of the greatest finite numbers.
    # From 2**900 on, the constant of `round_to` might be infinite: such terms are scaled by 2**-64,
    # and `round_sums` scales their sum back.
    top = tl.minimum(top, 2046)
    large = top >= 1923
    term = tl.where(large, term * 5.421010862427522e-20, term)  # 2**-64
    last = tl.maximum(tl.where(large, top - 64, top), 1) + (size - 52)
    is_cut = is_finite(term) & (term != 0)
    rest = term
    for number in tl.static_range(PIECES):
        # An infinity, a NaN or a zero goes into the first piece as it is.
        piece = tl.where(is_cut, round_to(rest, last), rest)
        rest = tl.where(is_cut, rest - piece, -0.0)
        # The first piece decides the sign of a zero; others that are zero change nothing.
        needed = mask if number == 0 else mask & (piece != 0)
        tl.atomic_add(sums, piece, mask=needed, sem="relaxed")
        # A rest is at most half a unit, of either sign, so that later pieces have two bits more
        # than the first one.
        last -= 54 - size
        sums += slots


@jit()
def add(left, right):
    """Return the rounded sum and its error."""
    # Knuth's two-sum: six operations that need not know which number is greater.
    total = left + right
    given = total - left
    return total, (left - (total - given)) + (right - given)


@jit()
def add_to_odd(left, right):
    """Return a sum whose last bit is 1 unless it is exact."""
    # Of a sum that is rounded to odd, a later rounding to nearest gives what one rounding of the
    # exact sum would have given, since it can be no tie unless it is exact.
    total, error = add(left, right)
    bits = tl.cast(total, tl.int64, bitcast=True)
    nearer = tl.where((error > 0) == (bits >= 0), bits + 1, bits - 1)
    bits = tl.where((error != 0) & ((bits & 1) == 0), nearer, bits)
    return tl.cast(bits, tl.float64, bitcast=True)


@jit()
def round_sums(
    out, tops, sums, element, slots,
    PIECES: tl.constexpr, INCLUDE: tl.constexpr, BITS: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    """Write the sums of the pieces, rounded once. ``BITS`` is 0 for float64."""
    mask = element < slots
    last = sums + (PIECES - 1) * slots.to(tl.int64) + element
    total = tl.load(last, mask=mask, other=0.0, cache_modifier=".cg")
    first = total
    tail = tl.zeros_like(total)
    for _ in tl.static_range(PIECES - 1):
        last -= slots
        first = tl.load(last, mask=mask, other=0.0, cache_modifier=".cg")
        total, error = add(first, total)
        tail = add_to_odd(error, tail)
    zero = (total == 0) & (tail == 0)
    if BITS == 0:
        # A sum of zeros keeps its sign, which `+ tail` would make positive.
        result = tl.where(zero, total, total + tail)
        top = tl.load(tops + element, mask=mask, other=0, cache_modifier=".cg")
        result = tl.where(top >= 1923, result * 18446744073709551616.0, result)  # 2**64
    else:
        result = tl.where(zero, total, add_to_odd(total, tail))
        # Below the least normal number of the format units do not shrink: its subnormal numbers.
        exponents = tl.maximum(read_exponents(result), LEAST + 1023)
        rounded = round_to(result, exponents - (BITS - 1))
        # The constant of `round_to` makes 0.0 of a small negative number, so the sign is set again.
        size = tl.cast(rounded, tl.int64, bitcast=True) & ~(-1 << 63)
        sign = tl.cast(result, tl.int64, bitcast=True) & (-1 << 63)
        result = tl.cast(size | sign, tl.float64, bitcast=True)
    # The sum of the first pieces has all infinities; their errors would be NaN.
    result = tl.where(is_finite(first), result, tl.where(first == first, first, float("nan")))
    if INCLUDE:
        own = tl.load(out + element, mask=mask, other=0.0)
        mask &= own == own  # a NaN keeps its bits
    # Exact in float32, from where the rounded number is one of the shorter formats, too.
    if BITS > 0:
        result = result.to(tl.float32)
    tl.store(out + element, result.to(out.dtype.element_ty), mask=mask)


@lru_cache(maxsize=4096)
def _prepare(layout, pieces, form, include, weighted, *_dtypes):
    """Return the size of the memory for the sums of pieces and the exponents, and the launches."""
    terms = layout.batch * layout.group * layout.rows * layout.inner
    slots = layout.batch * layout.group * layout.places * layout.inner
    added = terms + (slots if include else 0)
    sizes = (layout.taps, layout.batch, layout.rows, layout.inner)
    reach = sum(max(size - 1, 0) * step for size, step in zip(sizes, layout.steps, strict=True))
    offsets = max(terms, pieces.number * slots, reach)
    rows, size = max(layout.rows, 1), pieces.size
    numbers = (*layout.steps, terms, slots, layout.places, rows, layout.inner, layout.group, size)
    constants = (layout.taps, pieces.number, weighted, include, *form)
    # Triton has no barrier across programs but the end of a launch.
    launches = [
        prepare_launch(accumulate_terms, some, offsets, *numbers, *constants, phase)
        for phase, some in enumerate((added, added, slots))
        if some
    ]
    # Two exponents of 32 bits have the size of one float64.
    return pieces.number * slots + (slots + 1) // 2, launches


def accumulate(out, index, values, weights, layout, pieces, form, include):
    """Write into each place of ``out`` the sum of the terms that go to it."""
    factors = values if weights is None else weights
    kinds = (weights is not None, out.dtype, index.dtype, values.dtype, factors.dtype)
    size, launches = _prepare(layout, pieces, form, include, *kinds)
    # One launch fills both; a half of -0.0 is 0 or negative, and raised by any exponent.
    start = -0.0 if include else 0.0
    sums = out.new_full((size,), start, dtype=torch.float64)
    for launch in launches:
        launch(out, values, factors, index, sums)


@jit("inputs", "outputs", "inner", "elements")
def apply_taps(
    source, out, begins, places, weights,
    inputs, outputs, inner, elements,
    WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write into each input the weighted sum of its outputs, along the second of three axes."""
    first = tl.program_id(0)
    if WIDE:
        first, inner = first.to(tl.int64), inner.to(tl.int64)
    element = first * BLOCK + tl.arange(0, BLOCK)
    mask = element < elements
    side = element // inner % inputs
    tap = tl.load(begins + side, mask=mask, other=0)
    # `begins` has one entry more than there are inputs, the end of the last one.
    number = tl.load(begins + side + 1, mask=mask, other=0) - tap
    start = element // inner // inputs * outputs * inner + element % inner
    total = tl.zeros([BLOCK], weights.dtype.element_ty)
    # A program has one bound for all of its inputs, the greatest of their numbers.
    for turn in range(tl.max(number)):
        here = turn < number
        place = start + tl.load(places + tap + turn, mask=here, other=0) * inner
        value = tl.load(source + place, mask=here, other=0.0)
        weight = tl.load(weights + tap + turn, mask=here, other=0.0)
        total = tl.where(here, total + value.to(total.dtype) * weight, total)
    tl.store(out + element, total.to(out.dtype.element_ty), mask=mask)


@lru_cache(maxsize=4096)
def _prepare_taps(inputs, outputs, outer, inner, *_dtypes):
    elements = outer * inputs * inner
    offsets = max(elements, outer * outputs * inner)
    return prepare_launch(apply_taps, elements, offsets, inputs, outputs, inner, elements)


def add_taps(out, source, taps):
    """Write into ``out`` the weighted sums of ``source``, along the second of three dimensions."""
    outer, inputs, inner = out.shape
    kinds = (source.dtype, out.dtype, taps.weights.dtype)
    launch = _prepare_taps(inputs, taps.outputs, outer, inner, *kinds)
    launch(source, out, taps.begins, taps.places, taps.weights)


@jit()
def pad_position(position, slope, size, RULE: tl.constexpr):
    """Move positions inside as the padding says, and return them with their slopes.

    Of ``RULE``, the fields of ``Rule`` after the neighbors, the third one is the padding, and the
    fourth one says whether corners are aligned.
    """
    dtype: tl.constexpr = position.dtype
    if RULE[2] == 2:
        low: tl.constexpr = 0.0 if RULE[3] else -0.5
        span = size - 1 if RULE[3] else size
        distance = position - low
        slope = tl.where(distance < 0, -slope, slope)
        # In float64 the rest is exact below 2**53 turns; beyond them torch defines no position.
        wide = tl.abs(distance).to(tl.float64)
        side = tl.zeros_like(wide) + span.to(tl.float64)
        turns = tl.floor(wide / side)
        rest = wide - turns * side
        is_less = rest < 0  # the quotient was rounded up
        turns = tl.where(is_less, turns - 1, turns)
        rest = tl.where(is_less, rest + side, rest).to(dtype)
        even = tl.floor(turns * 0.5) * 2 == turns
        position = tl.where(even, rest + low, span.to(dtype) - rest + low)
        slope = tl.where(even, slope, -slope)
        position = tl.where(span == 0, 0.0, position)
        slope = tl.where(span == 0, 0.0, slope)
    if RULE[2] != 0:
        last = tl.zeros_like(position) + (size - 1).to(dtype)
        # A NaN keeps its slope, as in torch.
        slope = tl.where((position <= 0) | (position >= last), 0.0, slope)
        position = tl.where(position < 0, 0.0, tl.where(position > last, last, position))
    # Torch's position for what no integer can represent. The bound is one of float32, too.
    return tl.where(tl.abs(position) <= 2147483520.0, position, -100.0), slope


@jit()
def find_neighbor(
    coordinate, size,
    NUMBER: tl.constexpr, OFFSETS: tl.constexpr, FACTORS: tl.constexpr, RULE: tl.constexpr,
):  # fmt: skip
    """Return a neighbor's place, its weight, and the weight's derivative by the coordinate."""
    dtype: tl.constexpr = coordinate.dtype
    rate = (size - 1 if RULE[3] else size).to(dtype)
    position = (coordinate + 1) * rate
    if not RULE[3]:
        position -= 1
    position *= 0.5
    slope = tl.zeros_like(position) + rate * 0.5
    if not RULE[1]:
        position, slope = pad_position(position, slope, size, RULE)
    if RULE[0]:
        base = round_to(position.to(tl.float64), tl.full([1], 1023, tl.int32)).to(dtype)
    else:
        base = tl.floor(position)
    after = position - base
    weight = tl.zeros_like(after)
    change = tl.zeros_like(after)
    degree: tl.constexpr = len(FACTORS) // len(OFFSETS)
    for turn in tl.static_range(degree):
        change = change * after + weight
        # Horner's scheme, and its derivative beside it.
        weight = weight * after + FACTORS[NUMBER * degree + turn]
    place = base + OFFSETS[NUMBER]
    if RULE[1]:
        place, _ = pad_position(place, slope, size, RULE)
    return place.to(size.dtype), weight, change * slope


@jit()
def match_channels(total, source, given, mask, inside, channels, size, outputs):
    """Add the products of what a neighbor has in each channel and of the gradient there."""
    match = total
    for _ in range(channels):
        read = tl.load(source, mask=mask & inside, other=0.0).to(match.dtype)
        match = match + read * tl.load(given, mask=mask, other=0.0).to(match.dtype)
        source += size
        given += outputs
    return match


_IMAGE = ["depth", "height", "width", "channels", "outputs", "elements"]


@jit(*_IMAGE)
def sample_image(
    grid, image, gradients, out, index, weights, depth, height, width, channels, outputs, elements,
    DIMS: tl.constexpr, OFFSETS: tl.constexpr, FACTORS: tl.constexpr, RULE: tl.constexpr,
    WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the gradient of each sample with respect to its coordinates, and its neighbors."""
    first = tl.program_id(0)
    if WIDE:
        first = first.to(tl.int64)
        depth, height, width = depth.to(tl.int64), height.to(tl.int64), width.to(tl.int64)
    sample = first * BLOCK + tl.arange(0, BLOCK)
    mask = sample < elements
    dtype: tl.constexpr = weights.dtype.element_ty
    size, plane = depth * height * width, sample // outputs * channels
    # The last dimension of a grid has x first, and the last dimension of an image is its width.
    x = tl.load(grid + sample * DIMS, mask=mask, other=0.0).to(dtype)
    y = tl.load(grid + sample * DIMS + 1, mask=mask, other=0.0).to(dtype)
    z = tl.load(grid + sample * DIMS + (DIMS - 1), mask=mask, other=0.0).to(dtype)  # or y again
    zero = tl.zeros([BLOCK], dtype)
    total_x, total_y, total_z = zero, zero, zero
    where = sample
    for number in tl.static_range(len(OFFSETS) ** DIMS):
        place_x, weight_x, slope_x = find_neighbor(
            x, width, number % len(OFFSETS), OFFSETS, FACTORS, RULE
        )
        place_y, weight_y, slope_y = find_neighbor(
            y, height, number // len(OFFSETS) % len(OFFSETS), OFFSETS, FACTORS, RULE
        )
        inside = (place_x >= 0) & (place_x < width) & (place_y >= 0) & (place_y < height)
        place = place_y * width + place_x
        weight_z, slope_z = tl.full([BLOCK], 1.0, dtype), zero
        if DIMS == 3:
            place_z, weight_z, slope_z = find_neighbor(
                z, depth, number // len(OFFSETS) // len(OFFSETS), OFFSETS, FACTORS, RULE
            )
            inside = inside & (place_z >= 0) & (place_z < depth)
            place += place_z * height * width
        # Outside is the place after the last one, which the sum leaves out.
        tl.store(index + where, tl.where(inside, place, size).to(index.dtype.element_ty), mask=mask)
        tl.store(weights + where, weight_z * weight_y * weight_x, mask=mask)
        where = where + elements
        if not RULE[0]:
            source = image + plane * size + tl.where(inside, place, 0)
            given = gradients + plane * outputs + sample % outputs
            match = match_channels(zero, source, given, mask, inside, channels, size, outputs)
            total_x = total_x + tl.where(inside, match * (weight_z * weight_y * slope_x), 0.0)
            total_y = total_y + tl.where(inside, match * (weight_z * slope_y * weight_x), 0.0)
            total_z = total_z + tl.where(inside, match * (slope_z * weight_y * weight_x), 0.0)
    tl.store(out + sample * DIMS, total_x.to(out.dtype.element_ty), mask=mask)
    tl.store(out + sample * DIMS + 1, total_y.to(out.dtype.element_ty), mask=mask)
    if DIMS == 3:
        tl.store(out + sample * DIMS + 2, total_z.to(out.dtype.element_ty), mask=mask)


@lru_cache(maxsize=4096)
def _prepare_sample(grid, index, image, gradients, rule, *_dtypes):
    elements, channels = prod(index[1:]), image[1]
    sizes = (*[1] * (5 - len(image)), *image[2:])
    offsets = max(map(prod, (grid, index, image, gradients)))
    places, factors = zip(*rule.neighbors, strict=True)  # Triton takes flat tuples
    constants = (grid[-1], places, sum(factors, ()), rule[1:])
    numbers = (*sizes, channels, index[2], elements, *constants)
    return prepare_launch(sample_image, elements, offsets, *numbers)


def sample(out, grid, image, gradients, index, weights, rule):
    """Write into ``out`` the gradient with respect to the grid, and the neighbors of samples."""
    tensors = (grid, index, image, gradients)
    launch = _prepare_sample(*[one.shape for one in tensors], rule, *[one.dtype for one in tensors])
    launch(grid, image, gradients, out, index, weights)
