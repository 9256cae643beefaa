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
