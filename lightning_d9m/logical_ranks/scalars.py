"""Sums of numbers that depend neither on their order nor on who adds them."""

import math
from collections.abc import Sequence
from fractions import Fraction


def sum_exactly(values: Sequence[float]) -> float:
    """Return the correctly rounded sum; with infinities and NaNs, what IEEE 754 says.

    It is that of `math.fsum`, so neither the order of the values nor the number of processes that
    hold them changes a bit.

    >>> sum_exactly([1e100, 1.0, -1e100])
    1.0
    """
    special = {value for value in values if not math.isfinite(value)}
    if special:
        return special.pop() if len(special) == 1 else math.nan
    try:
        return math.fsum(values)
    except OverflowError:  # a partial sum, perhaps not the sum
        total = sum(map(Fraction, values), Fraction(0))
        try:
            return float(total)
        except OverflowError:
            return math.inf if total > 0 else -math.inf


def add_exactly(partials: list[float], number: float) -> list[float]:
    """Return partial sums that do not overlap, and whose sum is not rounded.

    As in Shewchuk (1997), "Adaptive Precision Floating-Point Arithmetic and Fast Robust Geometric
    Predicates". So merging the sums of two processes gives the bits that one would have got.
    """
    if not all(map(math.isfinite, (number, *partials))):
        return [*partials, number]  # no sum of it is finite
    kept = []
    for partial in partials:
        large, small = (number, partial) if abs(number) > abs(partial) else (partial, number)
        number = large + small
        if error := small - (number - large):
            kept.append(error)
    return [*kept, number]
