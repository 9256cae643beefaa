"""An exact sum depends on its values only; the bytes of all processes arrive whole."""

import math
import struct

import pytest
import torch
from gloo_threads import run_processes
from hypothesis import given
from hypothesis import strategies as st

from lightning_d9m.logical_ranks import scalars
from lightning_d9m.logical_ranks.scalars import gather_bytes, sum_exactly


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


def test_bytes_are_gathered_in_inference_mode():
    def gather(process, group):
        with torch.inference_mode():
            return gather_bytes(bytes([process]), group)

    assert run_processes(2, gather) == [[b"\0", b"\1"]] * 2


def test_bytes_of_any_length_arrive():
    for length in (0, 1, scalars._FIRST_BYTES - 8, scalars._FIRST_BYTES - 7, 10**5):
        parts = [b"a" * length, b"b" * (length // 2)]
        assert run_processes(2, lambda p, group, s=parts: gather_bytes(s[p], group)) == [parts] * 2
