"""Terms of sums, and the sums by rational numbers, rounded once."""

import math
from collections.abc import Iterable
from fractions import Fraction

import torch
from torch import Tensor

from lightning_d9m.patches.kernels.exact_sum import FORMATS

DTYPES = tuple(FORMATS)
NAN, INF = math.nan, math.inf

# Terms of one output each, without and with what else matters there.
SPECIAL: dict[str, list[float]] = {
    "nothing": [],
    "zero": [0.0],
    "negative-zeros": [-0.0, -0.0],
    "zeros": [-0.0, 0.0],
    "cancelled": [1.5, -1.5],
    "infinity": [1.0, INF, -3.0],
    "negative-infinity": [-INF, 5.0, -INF],
    "both-infinities": [INF, 1.0, -INF],
    "nan": [1.0, NAN],
    "nan-and-infinity": [NAN, INF, -INF],
    "tie-to-even": [1.0, 2.0**-11, 2.0**-24, 2.0**-53],
    "more-than-a-tie": [1.0, 2.0**-12, 2.0**-12, 2.0**-35],
    "canceled-but-for-little": [1024.0, 2.0**-10, -1024.0],
    "below-the-guard": [1.0, 2.0**-100, -1.0],
    "largest": [65504.0, 65504.0, -65504.0],
}


def round_fraction(value: Fraction, dtype: torch.dtype) -> float:
    """Round a rational number to nearest, with ties to even."""
    form = FORMATS[dtype]
    if not value:
        return 0.0
    magnitude = abs(value)
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    if magnitude < Fraction(2) ** exponent:
        exponent -= 1
    place = Fraction(2) ** max(exponent - form.fraction, form.last_place)
    rounded = round(magnitude / place) * place  # Python rounds ties to even
    if rounded >= Fraction(2) ** (form.bias + 1):
        return INF if value > 0 else -INF
    return float(rounded if value > 0 else -rounded)


def add_exactly(terms: Iterable[float], dtype: torch.dtype) -> float:
    """Add numbers without an error, and round the sum once."""
    numbers = list(terms)
    if not all(map(math.isfinite, numbers)):
        return sum(numbers)
    if numbers and all(number == 0 and math.copysign(1, number) < 0 for number in numbers):
        return -0.0
    return round_fraction(sum(map(Fraction, numbers), Fraction(0)), dtype)


def make_terms(dtype: torch.dtype, count: int, spread: int) -> Tensor:
    """Return random numbers whose exponents differ by at most ``spread``."""
    numbers = torch.rand(count, dtype=torch.float64) + 1
    signs = torch.randint(0, 2, (count,)) * 2 - 1
    low = -min(spread, 24 if dtype == torch.float16 else spread)
    exponents = torch.randint(low, 1, (count,))
    return (numbers * signs * torch.exp2(exponents.double())).to(dtype)


def make_special(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the terms of all special cases, one after the other, and the number of each's case."""
    lists = list(SPECIAL.values())
    index = [number for number, terms in enumerate(lists) for _ in terms]
    values = [term for terms in lists for term in terms]
    return torch.tensor(index), torch.tensor(values, dtype=dtype)


def bits(values: Tensor) -> Tensor:
    """Return the bits as integers."""
    return values.view(FORMATS[values.dtype].integer)
