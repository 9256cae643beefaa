"""An exact sum depends on its values only."""

import math
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_d9m.logical_ranks.scalars import sum_exactly


@given(st.lists(st.floats(width=64)), st.randoms())
def test_the_order_changes_no_bit_of_a_sum(values, shuffler):
    mixed = shuffler.sample(values, len(values))
    assert struct.pack("d", sum_exactly(values)) == struct.pack("d", sum_exactly(mixed))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([], 0.0),
        ([1e308, 1e308, -1e308], 1e308),
        ([1e308, 1e308], math.inf),
        ([-1e308, -1e308], -math.inf),
        ([math.inf, 1.0, 1e308, 1e308], math.inf),
        ([-math.inf, 1.0], -math.inf),
    ],
)
def test_a_sum_of_large_values_is_what_the_exact_one_rounds_to(values, expected):
    assert sum_exactly(values) == expected


@pytest.mark.parametrize("values", [[math.inf, -math.inf], [math.nan, 1.0], [math.nan, math.inf]])
def test_a_sum_without_a_value_is_nan(values):
    assert math.isnan(sum_exactly(values))
