"""An exact sum depends on its values only."""

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_d9m.integrations.strategies.steps.logged_values import add_exactly, sum_exactly


@given(st.lists(st.floats(-1e300, 1e300)))
def test_neither_partial_sums_nor_their_sum_are_rounded_before_the_end(values):
    partials = []
    for value in values:
        partials = add_exactly(partials, value)
    assert sum(map(Fraction, partials)) == sum(map(Fraction, values))
    assert sum_exactly(values) == sum_exactly(partials) == math.fsum(values)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1e308, 1e308, -1e308], 1e308),
        ([1e308, 1e308], math.inf),
        ([-1e308, -1e308], -math.inf),
        ([-math.inf, 1.0], -math.inf),
        ([math.inf, -math.inf], math.nan),
        ([math.nan, 1.0], math.nan),
        ([math.nan, math.inf], math.nan),
    ],
)
def test_a_sum_of_large_values_is_what_the_exact_one_rounds_to(values, expected):
    partials = []
    for value in values:
        partials = add_exactly(partials, value)
    for found in (sum_exactly(values), sum_exactly(partials)):
        assert found == pytest.approx(expected, rel=0, nan_ok=True)
