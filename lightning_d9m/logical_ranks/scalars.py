"""Sums of numbers that depend neither on their order nor on who adds them."""

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any


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


class ExactMean:
    """A weighted mean of numbers, kept without rounding.

    It keeps partial sums that do not overlap, as in Shewchuk (1997), "Adaptive Precision
    Floating-Point Arithmetic and Fast Robust Geometric Predicates", so merging the sums of two
    processes gives the bits that one process would have got.
    """

    def __init__(self) -> None:
        self.partials: list[float] = []
        self.weight = 0

    def add(self, value: float, weight: int = 1) -> None:
        """Add a value; the product with its weight is exact for values of float32."""
        self.weight += weight
        self._add(value * weight)

    def merge(self, partials: Sequence[float], weight: int) -> None:
        """Add the sum that another process kept."""
        self.weight += weight
        for partial in partials:
            self._add(partial)

    def _add(self, number: float) -> None:
        if not math.isfinite(number) or not all(map(math.isfinite, self.partials)):
            self.partials.append(number)  # no sum of it is finite
            return
        kept = []
        for partial in self.partials:
            large, small = (number, partial) if abs(number) > abs(partial) else (partial, number)
            number = large + small
            if error := small - (number - large):
                kept.append(error)
        self.partials = [*kept, number]

    @property
    def total(self) -> float:
        """The sum, rounded once."""
        return sum_exactly(self.partials)

    @property
    def mean(self) -> float:
        """The mean; NaN if there is no value."""
        return self.total / self.weight if self.weight else math.nan

    def as_plain(self) -> list[Any]:
        """Return the partial sums and the weight."""
        return [self.partials, self.weight]
