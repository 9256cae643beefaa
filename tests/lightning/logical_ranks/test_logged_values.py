"""An exact sum depends on its values only."""

import math
import struct
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_d9m.lightning.logical_ranks.logged_values import add_exactly, sum_exactly


@given(st.lists(st.floats(width=64)), st.randoms())
def test_the_order_changes_no_bit_of_a_sum(values, shuffler):
    mixed = shuffler.sample(values, len(values))
    assert struct.pack("d", sum_exactly(values)) == struct.pack("d", sum_exactly(mixed))


@given(st.lists(st.floats(-1e300, 1e300)))
def test_partial_sums_are_not_rounded(values):
    partials = []
    for value in values:
        partials = add_exactly(partials, value)
    assert sum(map(Fraction, partials)) == sum(map(Fraction, values))
    assert sum_exactly(partials) == math.fsum(values)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1e308, 1e308, -1e308], 1e308),
        ([1e308, 1e308], math.inf),
        ([-1e308, -1e308], -math.inf),
        ([-math.inf, 1.0], -math.inf),
    ],
)
def test_a_sum_of_large_values_is_what_the_exact_one_rounds_to(values, expected):
    assert sum_exactly(values) == expected


@pytest.mark.parametrize("values", [[math.inf, -math.inf], [math.nan, 1.0], [math.nan, math.inf]])
def test_a_sum_without_a_value_is_nan(values):
    assert math.isnan(sum_exactly(values))
