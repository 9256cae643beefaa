"""The first difference of two traces, by place."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_d9m.hashing.digest import digest_value
from lightning_d9m.probes.trace import Trace, find_difference


@given(st.lists(st.integers(0, 2), min_size=1, max_size=12), st.data())
def test_the_first_difference_of_traces_is_found(values, data):
    place = data.draw(st.integers(0, len(values) - 1))
    expected, actual = Trace(), Trace()
    for number, value in enumerate(values):
        expected.add("output", f"m{value}", torch.tensor([number]))
        actual.add("output", f"m{value}", torch.tensor([-1 if number == place else number]))
    difference = find_difference(expected, actual)
    assert difference is not None
    assert difference.place == expected.places[place]
    assert difference.differing == 1
    assert find_difference(expected, expected) is None


def test_a_place_that_only_one_trace_has_is_a_difference():
    expected, actual = Trace(), Trace()
    actual.add("output", "a", 1)
    difference = find_difference(expected, actual)
    assert difference == (("output", "a", 0), None, digest_value(1), 1)
