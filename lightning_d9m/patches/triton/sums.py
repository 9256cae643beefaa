# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: ANN001, ANN201, N803, PLR0124, PLR0913, PLR0917, PLR2004 - Triton's compiler reads these functions
"""Kernels of the sums of ``patches/exact_sums.py``, which has the definition, with the same bits.

The first launch raises the exponent of each sum to that of its greatest term, by maxima of 32-bit
integers; the second one cuts the terms and adds their pieces in float64; the last one rounds. No
addition of pieces rounds, and maxima compare, so the order of the threads has no effect.
"""

import torch
import triton
import triton.language as tl

from lightning_d9m.patches.triton.launch import launch_blocks, needs_int64


@triton.jit
def read_exponents(values):
    """Return the biased exponents of float64 numbers."""
    return ((values.to(tl.int64, bitcast=True) >> 52) & 0x7FF).to(tl.int32)


@triton.jit
def round_to(values, last):
    """Round float64 numbers to multiples of ``2**(last - 1023)``, by a constant."""
    exponents = tl.maximum(last + 52, 1).to(tl.int64)
    constant = ((exponents << 52) | (1 << 51)).to(tl.float64, bitcast=True)
    return (values + constant) - constant


@triton.jit
def is_finite(values):
    """Return which float64 numbers are neither infinite nor NaN."""
    return read_exponents(values) < 0x7FF


_SIZES = ["steps_tap", "steps_batch", "steps_row", "steps_column", "terms", "slots", "count"]


@triton.jit(do_not_specialize=[*_SIZES, "rows", "inner", "group", "size", "elements"])
def add_terms(
    out,
    values,
    weights,
    index,
    tops,
    sums,
    steps_tap,
    steps_batch,
    steps_row,
    steps_column,
    terms,
    slots,
    count,
    rows,
    inner,
    group,
    size,
    elements,
    TAPS: tl.constexpr,
    PIECES: tl.constexpr,
    WEIGHTED: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Raise the exponents of sums to those of their terms, or add the pieces of the terms.

    The terms are the values times their weights, then what is in ``out``. Without pieces the
    exponents are raised.
    """
    first = tl.program_id(0)
    if WIDE:
        first = first.to(tl.int64)
    element = first * BLOCK + tl.arange(0, BLOCK)
    given = element < terms
    own = ~given & (element < elements)
    line = element // inner
    batch = line // rows
    # The strides of the index: it may be the same for each batch, channel or column.
    where = (batch // group) * steps_batch + (line % rows) * steps_row
    where += (element % inner) * steps_column
    value = tl.load(values + element, mask=given, other=0.0)
    kept = tl.load(out + (element - terms), mask=own, other=0.0)
    for tap in tl.static_range(TAPS):
        key = tl.load(index + where, mask=given, other=-1).to(element.dtype)
        mask = given & (key >= 0) & (key < count)
        term = value.to(tl.float64)
        if WEIGHTED:
            weight = tl.load(weights + where, mask=mask, other=0.0)
            term = (value.to(weight.dtype) * weight).to(tl.float64)
        place = (batch * count + key) * inner + element % inner
        if tap == 0:
            term = tl.where(own, kept.to(tl.float64), term)
            place = tl.where(own, element - terms, place)
            mask = mask | own
        if PIECES == 0:
            raise_exponents(tops + place, term, mask)
        else:
            top = tl.load(tops + place, mask=mask, other=0)
            add_pieces(sums + place, term, top, mask, slots, size, PIECES)
        where += steps_tap


@triton.jit
def raise_exponents(tops, term, mask):
    """Raise the exponents of sums to those of terms."""
    # Exponents only grow: one that was read too early spares an atomic or not, and no more.
    top = tl.load(tops, mask=mask, other=0)
    exponent = read_exponents(term)
    tl.atomic_max(tops, exponent, mask=mask & (exponent > top), sem="relaxed")


@triton.jit
def add_pieces(sums, term, top, mask, slots, size, PIECES: tl.constexpr):
    """Add the pieces of terms to the sums of pieces, which are ``slots`` apart."""
    top = tl.minimum(top, 2046)
    large = top >= 1923
    term = tl.where(large, term * 5.421010862427522e-20, term)  # 2**-64
    last = tl.maximum(tl.where(large, top - 64, top), 1) + (size - 52)
    is_cut = is_finite(term) & (term != 0)
    rest = term
    for number in tl.static_range(PIECES):
        piece = tl.where(is_cut, round_to(rest, last), rest)
        rest = tl.where(is_cut, rest - piece, -0.0)
        # The first piece decides the sign of a zero; others that are zero change nothing.
        needed = mask if number == 0 else mask & (piece != 0)
        tl.atomic_add(sums, piece, mask=needed, sem="relaxed")
        last -= 54 - size
        sums += slots


@triton.jit
def add(left, right):
    """Return the rounded sum and its error."""
    total = left + right
    given = total - left
    return total, (left - (total - given)) + (right - given)


@triton.jit
def add_to_odd(left, right):
    """Return a sum whose last bit is 1 unless it is exact."""
    total, error = add(left, right)
    bits = total.to(tl.int64, bitcast=True)
    nearer = tl.where((error > 0) == (bits >= 0), bits + 1, bits - 1)
    bits = tl.where((error != 0) & ((bits & 1) == 0), nearer, bits)
    return bits.to(tl.float64, bitcast=True)


@triton.jit(do_not_specialize=["elements"])
def round_sums(
    out,
    tops,
    sums,
    elements,
    PIECES: tl.constexpr,
    INCLUDE: tl.constexpr,
    BITS: tl.constexpr,
    LEAST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the sums of the pieces, rounded once. ``BITS`` is 0 for float64."""
    element = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = element < elements
    last = sums + (PIECES - 1) * elements.to(tl.int64) + element
    total = tl.load(last, mask=mask, other=0.0)
    first = total
    tail = tl.zeros_like(total)
    for _ in tl.static_range(PIECES - 1):
        last -= elements
        first = tl.load(last, mask=mask, other=0.0)
        total, error = add(first, total)
        tail = add_to_odd(error, tail)
    zero = (total == 0) & (tail == 0)
    if BITS == 0:
        result = tl.where(zero, total, total + tail)
    else:
        result = tl.where(zero, total, add_to_odd(total, tail))
    top = tl.load(tops + element, mask=mask, other=0)
    result = tl.where(top >= 1923, result * 18446744073709551616.0, result)  # 2**64
    if BITS > 0:
        exponents = tl.maximum(read_exponents(result), LEAST + 1023)
        rounded = round_to(result, exponents - (BITS - 1)).to(tl.int64, bitcast=True)
        sign = result.to(tl.int64, bitcast=True) & (-1 << 63)
        result = ((rounded & ~(-1 << 63)) | sign).to(tl.float64, bitcast=True)
    result = tl.where(is_finite(first), result, tl.where(first == first, first, float("nan")))
    if INCLUDE:
        own = tl.load(out + element, mask=mask, other=0.0)
        mask &= own == own  # a NaN keeps its bits
    # Exact in float32, from where the rounded number is one of the shorter formats, too.
    if BITS > 0:
        result = result.to(tl.float32)
    tl.store(out + element, result.to(out.dtype.element_ty), mask=mask)


def accumulate(out, part, pieces, form, include):
    """Write into each place of ``out`` the sum of the terms that go to it."""
    index, values, weights = part
    batch, group, rows, inner = values.shape
    taps, slots, terms = len(index), out.numel(), values.numel()
    steps = index.expand(taps, batch, rows, inner).stride()
    tops = torch.zeros(slots, dtype=torch.int32, device=out.device)
    start = -0.0 if include else 0.0
    shape = (pieces.number, slots)
    sums = torch.full(shape, start, dtype=torch.float64, device=out.device)
    wide = needs_int64(values, sums, index)
    for number in (0, pieces.number):
        launch_blocks(
            add_terms,
            values,
            terms + (slots if include else 0),
            out,
            values,
            values if weights is None else weights,
            index,
            tops,
            sums if number else tops,
            *steps,
            terms,
            slots,
            out.shape[2],
            max(rows, 1),
            inner,
            group,
            pieces.size,
            TAPS=taps,
            PIECES=number,
            WEIGHTED=weights is not None,
            WIDE=wide,
        )
    form = {"BITS": form[0], "LEAST": form[1]}
    launch_blocks(
        round_sums, out, slots, out, tops, sums, PIECES=pieces.number, INCLUDE=include, **form
    )
