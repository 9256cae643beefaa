"""Sums that do not depend on the order of their terms, by integers.

Each output has an exponent, that of its greatest term. Each term becomes an integer: a multiple of
the last place of a term with this exponent, divided by 2**GUARD. Integers are added exactly, in any
order, so threads may add them with atomics, and the sum has the same bits on every device. It is
rounded once, to the dtype of the output, to nearest with ties to even.

What lies below the GUARD bits of a term is cut off. A sum is therefore exact before it is rounded
if its terms span less than 2**GUARD; else the error before it is rounded is less than
2**-GUARD units in the last place of the greatest term, for each term.

An integer is kept in two limbs (three for float64) of 64 bits, of which each term fills so few that
no sum overflows. The functions here use torch ops; ``patches/triton/exact_sum.py`` has the kernels.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_d9m.patches.triton.launch import allocate, run_kernel

GUARD = 40
"""Bits below the last place of an output's greatest term that are added."""

_MANY = 2  # outputs for each value, beyond which only those that get a value are read
_WORD = 64
_HALF = 47  # bits of a limb: two then hold the 53 bits of float64 and GUARD more
# Keys of terms are ordered as their exponents: nothing, -0.0, 0.0, then the exponent's field + 2.
_NEGATIVE_ZERO, _ZERO, _FIRST = 1, 2, 2


class FloatFormat(NamedTuple):
    """The bits of a floating-point dtype.

    Attributes:
        fraction: Bits of the fraction.
        exponent: Bits of the exponent.
        integer: The signed integers of the same size.
    """

    fraction: int
    exponent: int
    integer: torch.dtype

    @property
    def bias(self) -> int:
        """The difference between the field of an exponent and the exponent."""
        return (1 << (self.exponent - 1)) - 1

    @property
    def last_place(self) -> int:
        """The exponent of the least positive number."""
        return 1 - self.bias - self.fraction


FORMATS = {
    torch.float16: FloatFormat(10, 5, torch.int16),
    torch.bfloat16: FloatFormat(7, 8, torch.int16),
    torch.float32: FloatFormat(23, 8, torch.int32),
    torch.float64: FloatFormat(52, 11, torch.int64),
}


class Terms(NamedTuple):
    """Numbers, taken apart.

    Attributes:
        negative: Whether the sign is set.
        significand: int64.
        key: int32; orders the numbers by their exponents.
    """

    negative: Tensor
    significand: Tensor
    key: Tensor


class Limbs(NamedTuple):
    """The layout of an output's integer.

    Attributes:
        number: How many there are.
        width: Bits of a term in each limb but the last.
        guard: Bits below the last place of the greatest term.
    """

    number: int
    width: int
    guard: int


def add_at(target: Tensor, sizes: Sequence[int], keys: Tensor, values: Tensor) -> None:
    """Add values to the places of a tensor that keys name; see :func:`update_places`.

    The target may be complex as well.
    """
    if target.is_complex():
        target, values = view_parts(target), view_parts(values)

    def add(rows: Tensor, keys: Tensor, values: Tensor) -> None:
        count, terms = len(rows), len(keys)
        accumulate(rows.view(1, count, -1), keys, values.reshape(1, terms, -1), include=True)

    update_places(target, sizes, keys, values, add)


def update_places(
    target: Tensor,
    sizes: Sequence[int],
    keys: Tensor,
    values: Tensor,
    update: Callable[[Tensor, Tensor, Tensor], None],
) -> None:
    """Change the places of a tensor that keys name.

    Time and memory grow with the number of values, not with the size of the target.

    Args:
        target: Of shape ``[*sizes, *rest]``, with any strides.
        sizes: The sizes of the dimensions that the keys go through.
        keys: Positions as if these dimensions were one; of shape ``[m]``.
        values: Of shape ``[m, *rest]``.
        update: Takes contiguous rows of shape ``[n, *rest]``, which it changes, and keys and values
            for them.
    """
    if not values.numel():
        return
    if not gets_few(target, values):
        whole = target.contiguous()
        update(whole.view(prod(sizes), *target.shape[len(sizes) :]), keys, values)
        if whole is not target:
            target.copy_(whole)
        return
    ordered = torch.sort(keys, stable=True).values
    slots = torch.searchsorted(ordered, keys)  # the first place of an equal key
    rows = target[unravel(ordered, sizes)].contiguous()  # it has the strides of the target
    update(rows, slots, values)
    # Values for one place are equal, so the order of the writes has no effect.
    target.index_put_(unravel(keys, sizes), rows.index_select(0, slots))


def gets_few(target: Tensor, values: Tensor) -> bool:
    """Return whether the values are so few that only their places should be read and written."""
    return target.numel() > _MANY * values.numel()


def add_slices(target: Tensor, shape: Sequence[int], index: Tensor, values: Tensor) -> None:
    """Add values to a tensor of any strides, viewed in a shape; see :func:`accumulate`."""
    whole = target.contiguous()
    accumulate(whole.view(shape), index, values, include=True)
    if whole is not target:
        target.copy_(whole)


def sum_by_index(index: Tensor, values: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """Return the sums of shape ``[outer, count, inner]``; see :func:`accumulate`."""
    outer, _, inner = values.shape
    like = torch.empty(0, dtype=dtype, device=values.device)
    out = allocate((outer, count, inner), like, torch.contiguous_format)
    accumulate(out, index, values, include=False)
    return out


def view_parts(values: Tensor) -> Tensor:
    """Return the real and the imaginary parts in a last dimension of 2."""
    return torch.view_as_real(values.resolve_conj())


def unravel(places: Tensor, shape: Sequence[int]) -> tuple[Tensor, ...]:
    """Turn positions in a flattened tensor into one index for each of its dimensions."""
    indices: list[Tensor] = []
    for size in reversed(shape[1:]):
        indices.append(places % size)
        places = places // size
    return (places, *reversed(indices))


def accumulate(out: Tensor, index: Tensor, values: Tensor, *, include: bool) -> None:
    """Write into each output the sum of the values whose index names it.

    Args:
        out: Floating point, contiguous, of shape ``[outer, count, inner]``.
        index: Of shape ``[m]``, or of the values' shape. What is outside ``0 .. count - 1`` is
            skipped.
        values: Of shape ``[outer, m, inner]``; float64 if and only if ``out`` is.
        include: Whether what is in ``out`` is a term as well. An output without a value then keeps
            its bits; else it becomes 0.
    """
    if not out.numel():
        return
    limbs = plan_limbs(out.dtype, values.shape[1] + 1)
    run_kernel(
        "exact_sum:accumulate",
        _accumulate,
        out,
        index.contiguous(),
        values.contiguous(),
        limbs,
        FORMATS[out.dtype],
        include=include,
    )


def plan_limbs(dtype: torch.dtype, terms: int) -> Limbs:
    """Return the layout for outputs of a dtype with at most so many terms."""
    size = terms.bit_length()
    spare = _WORD - 1 - size
    # Most terms leave all limbs but one (of float64, but two) at zero, which costs no addition.
    # With more than 2**31 terms to an output fewer guard bits remain.
    count, bits, width = (3, 53, _HALF) if dtype == torch.float64 else (2, 24, size + 1)
    return Limbs(count, min(width, spare), min(GUARD, count * spare - bits))


def _accumulate(
    out: Tensor, index: Tensor, values: Tensor, limbs: Limbs, form: FloatFormat, *, include: bool
) -> None:
    outer, count, inner = out.shape
    device, slots = out.device, out.numel()
    index = index.to(torch.int64)
    if index.dim() == 1:
        index = index.view(1, -1, 1)
    rows = torch.arange(outer, device=device).view(-1, 1, 1)
    places = (rows * count + index) * inner + torch.arange(inner, device=device)
    places = torch.where((index >= 0) & (index < count), places, slots).flatten()
    source = FORMATS[torch.float64 if out.dtype == torch.float64 else torch.float32]
    terms = _split_floats(values.flatten())
    flat = out.view(-1)
    start = _split_floats(flat) if include else None
    keys = torch.zeros(slots + 1, dtype=torch.int32, device=device)
    if start is not None:
        keys[:slots] = start.key
    keys.scatter_reduce_(0, places, terms.key, "amax")
    sums = torch.zeros(limbs.number, slots + 1, dtype=torch.int64, device=device)
    for limb, digits in zip(
        sums, _cut(terms, keys.index_select(0, places), limbs, source), strict=True
    ):
        limb.index_add_(0, places, digits)
    keys, sums = keys[:slots], sums[:, :slots]
    if start is not None:
        sums = sums + torch.stack(_cut(start, keys, limbs, source))
    result = _round(sums, keys, limbs, source, form, keep_sign=include)
    flat.copy_(torch.where(flat.isnan(), flat, result) if include else result)


def _split_floats(values: Tensor) -> Terms:
    if values.dtype != torch.float64:
        values = values.to(torch.float32)
    form = FORMATS[values.dtype]
    bits = values.view(form.integer).to(torch.int64)
    field = (bits >> form.fraction) & ((1 << form.exponent) - 1)
    fraction = bits & ((1 << form.fraction) - 1)
    significand = torch.where(field > 0, fraction + (1 << form.fraction), fraction)
    key = torch.where(significand > 0, field.clamp(min=1) + _FIRST, _ZERO - (bits < 0).long())
    is_nan = (field == (1 << form.exponent) - 1) & (fraction > 0)
    return Terms(bits < 0, significand, (key + is_nan).to(torch.int32))


def _cut(terms: Terms, top: Tensor, limbs: Limbs, source: FloatFormat) -> list[Tensor]:
    """Return what each term adds to the limbs of its output, whose greatest key is ``top``."""
    infinite = (1 << source.exponent) - 1 + _FIRST
    distance = (top - terms.key).to(torch.int64)
    digits = []
    for limb in range(limbs.number):
        shift = distance + (limb * limbs.width - limbs.guard)
        right, left = shift.clamp(0, _WORD - 1), (-shift).clamp(0, _WORD - 1)
        digit = (terms.significand >> right) << left
        if limb < limbs.number - 1:
            digit &= (1 << limbs.width) - 1
        digit = torch.where(terms.negative, -digit, digit)
        # An output with an infinite term counts the positive and the negative ones.
        matches = (terms.key == infinite) & (terms.negative == (limb == 1)) & (limb < 2)  # noqa: PLR2004 - of two signs
        digits.append(torch.where(top >= infinite, matches.long(), digit))
    return digits


def _round(
    sums: Tensor,
    top: Tensor,
    limbs: Limbs,
    source: FloatFormat,
    form: FloatFormat,
    *,
    keep_sign: bool,
) -> Tensor:
    """Return the numbers that the limbs stand for, rounded once."""
    negative = _carry(sums, limbs)[-1] < 0
    high, low = _join(_carry(torch.where(negative, -sums, sums), limbs), limbs)
    length = torch.where(high > 0, _WORD + _count_bits(high), _count_bits(low))
    unit = top.to(torch.int64) - (_FIRST + source.bias + source.fraction + limbs.guard)
    cut = torch.maximum(length - (form.fraction + 1), form.last_place - unit)
    dropped = (cut - 1).clamp(min=0)
    whole = _shift(high, low, dropped)  # and, if something is cut off, one bit more
    sticky = _shift(high, low, dropped) << dropped.clamp(max=_WORD - 1) != low
    sticky = torch.where(dropped >= _WORD, (low != 0) | (_tail(high, dropped - _WORD)), sticky)
    half, odd = (whole & 1) > 0, (whole & 2) > 0
    kept = torch.where(
        cut > 0,
        (whole >> 1) + (half & (sticky | odd)).long(),
        low << (-cut).clamp(0, _WORD - 1),
    )
    field = unit + cut - form.last_place
    largest = (1 << form.exponent) - 3
    infinity = ((1 << form.exponent) - 1) << form.fraction
    bits = (field.clamp(0, largest) << form.fraction) + kept
    bits = torch.where(field > largest, infinity, bits)
    zero = (high | low) == 0
    bits = torch.where(zero, 0, bits)
    negative = torch.where(zero, (top == _NEGATIVE_ZERO) & keep_sign, negative)
    infinite = (1 << source.exponent) - 1 + _FIRST
    ups, downs = sums[0] > 0, sums[1] > 0
    bits = torch.where(top >= infinite, infinity, bits)
    bits = torch.where(
        (top > infinite) | ((top == infinite) & ups & downs),
        infinity + (1 << (form.fraction - 1)),
        bits,
    )
    negative = torch.where(top >= infinite, downs & ~ups & (top == infinite), negative)
    least = torch.iinfo(form.integer).min
    bits = torch.where(negative, bits + least, bits).to(form.integer)
    return bits.view(next(dtype for dtype, known in FORMATS.items() if known == form))


def _carry(sums: Tensor, limbs: Limbs) -> list[Tensor]:
    """Return the same integers with limbs from 0 to 2**width - 1, except the last."""
    digits, carried = [], torch.zeros_like(sums[0])
    for limb in sums[:-1]:
        total = limb + carried
        carried = total >> limbs.width
        digits.append(total & ((1 << limbs.width) - 1))
    return [*digits, sums[-1] + carried]


def _join(digits: list[Tensor], limbs: Limbs) -> tuple[Tensor, Tensor]:
    """Return the upper and the lower 64 bits of positive integers."""
    low, high = digits[0], torch.zeros_like(digits[0])
    for limb, digit in enumerate(digits[1:], start=1):
        place = limb * limbs.width
        if place < _WORD:
            low, high = low | (digit << place), high | (digit >> (_WORD - place))
        else:
            high |= digit << (place - _WORD)
    return high, low


def _shift(high: Tensor, low: Tensor, by: Tensor) -> Tensor:
    """Return the lower 64 bits of 128 bits, shifted to the right by less than 128."""
    few = by.clamp(max=_WORD - 1)
    within = torch.where(by > 0, _shift_word(low, few) | (high << (_WORD - by).clamp(0, 63)), low)
    return torch.where(by < _WORD, within, _shift_word(high, (by - _WORD).clamp(0, _WORD - 1)))


def _shift_word(word: Tensor, by: Tensor) -> Tensor:
    """Shift 64 bits to the right, filling with zeros."""
    return torch.where(by > 0, (word >> by) & ~(torch.full_like(word, -1) << (_WORD - by)), word)


def _tail(word: Tensor, bits: Tensor) -> Tensor:
    """Return whether one of the lowest bits is set."""
    bits = bits.clamp(0, _WORD - 1)
    return _shift_word(word, bits) << bits != word


def _count_bits(word: Tensor) -> Tensor:
    """Return the number of bits up to the highest one that is set."""
    count = torch.zeros_like(word)
    for step in (32, 16, 8, 4, 2, 1):
        upper = _shift_word(word, torch.full_like(word, step))
        count = torch.where(upper != 0, count + step, count)
        word = torch.where(upper != 0, upper, word)
    return count + (word != 0)
