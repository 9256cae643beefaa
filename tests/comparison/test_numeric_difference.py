"""Numeric differences: their formulas, and their guarantees about bits and order."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_d9m.tools.comparison.numeric_difference import (
    SpreadMeter,
    measure_difference,
    measure_variation,
)

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn)
WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
COMPLEX = (torch.complex64, torch.complex128)
# Any bytes at all: every NaN, both zeros, subnormals.
BYTES = st.binary(min_size=16, max_size=64).filter(lambda raw: len(raw) % 16 == 0)


def tensor_of(raw, dtype):
    """Return a tensor with these bytes; a bool has only two of them."""
    flat = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    return (flat & 1).view(torch.bool) if dtype == torch.bool else flat.clone().view(dtype)


def bits(tensor):
    return tensor.contiguous().view(torch.uint8).tolist()


@pytest.mark.parametrize("dtype", [*FLOATS, *WHOLE, *UNSIGNED, *COMPLEX], ids=str)
@settings(max_examples=30)
@given(left=BYTES, other=st.none() | BYTES)
def test_each_metric_is_zero_exactly_when_all_bits_agree(dtype, left, other):
    right = other or left
    size = min(len(left), len(right))
    expected, actual = (tensor_of(raw[:size], dtype) for raw in (left, right))
    found = measure_variation(expected, actual)
    same = bits(expected) == bits(actual)
    assert (found.vc == 0) == same
    assert (found.vermv == 0) == same
    assert (found.ulps == 0) == same
    assert found.vs is None or (found.vs == 0) == same


def test_the_formulas():
    """Vermv is the mean of |A - B| / |A|, Vc the share that differs, and Vs is of one number."""
    found = measure_variation(torch.tensor([1.0, 2.0, 4.0, 8.0]), torch.tensor([1.0, 3.0, 3.0, 8]))
    assert found.vermv == pytest.approx((0.5 + 0.25) / 4)
    assert found.vc == 0.5
    assert found.vs is None
    assert measure_variation(torch.tensor(4.0), torch.tensor(5.0)).vs == 0.25
    assert measure_variation(torch.tensor(4.0), torch.tensor(-4.0)).vs == 2
    # Large whole numbers are told apart.
    found = measure_variation(torch.tensor([2**60]), torch.tensor([2**60 + 1]))
    assert (found.vermv, found.ulps) == (2.0**-60, 1)


@pytest.mark.parametrize(
    ("old", "new", "ulps"),
    [
        (1.0, 1.0 + 2**-23, 1),
        (-1.0, -1.0 - 2**-23, 1),
        (2.0**-149, -(2.0**-149), 3),
        (3.4028234663852886e38, math.inf, 1),
        (-(2**63), 2**63 - 1, 2**63 - 1),
        (*torch.tensor([-1, 2**63 - 1]).view(torch.float64), 2**63 - 1),
    ],
)
def test_ulps_count_representable_numbers(old, new, ulps):
    """A distance that no int64 holds is the greatest."""
    assert measure_variation(torch.as_tensor(old), torch.as_tensor(new)).ulps == ulps


@pytest.mark.parametrize("other", [torch.ones(2, 1), torch.ones(2, dtype=torch.float64)])
def test_another_shape_or_dtype_is_changed_entirely_and_not_measured(other):
    whole = measure_variation(torch.ones(2), other)
    assert (whole.vermv, whole.vc) == (1, 1)
    assert measure_difference(torch.ones(2), other) is None


def test_large_whole_numbers_are_told_apart():
    found = measure_difference(torch.tensor([2**62, 1]), torch.tensor([2**62 + 1, 1]))
    assert (found.count, found.absolute, found.relative) == (1, 1.0, 2.0**-62)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
        lambda: torch.ones(2).to_sparse(),
        lambda: torch.ones(2, device="meta"),
        lambda: torch.zeros(2, dtype=torch.uint8).view(torch.bits8),
    ],
    ids=["quantized", "sparse", "meta", "bits"],
)
@pytest.mark.filterwarnings("ignore:.*quantize")
def test_elements_that_are_no_numbers_of_their_own_are_not_measured(make):
    assert measure_difference(make(), make()) is None
    assert measure_variation(make(), make()).vc == 1


def test_views_that_negate_do_not_matter():
    negated = torch._neg_view(torch.ones(2))
    assert measure_difference(negated, torch.tensor([-1.0, -2.0])).count == 1
    assert measure_difference(negated, -torch.ones(2)).count == 0


def test_strides_and_conjugate_views_do_not_matter():
    square = torch.arange(4.0).view(2, 2)
    assert measure_variation(square.t(), square.t().contiguous()).vc == 0
    numbers = torch.tensor([1 + 2j, 3 - 1j])
    assert measure_variation(numbers.conj(), numbers.conj().resolve_conj()).vc == 0


RUNS = st.lists(
    st.lists(st.floats(width=32), min_size=3, max_size=3).map(torch.tensor), min_size=1, max_size=6
)


def spread_of(runs):
    meter = SpreadMeter()
    for run in runs:
        meter.add(run)
    return meter.spread()


@given(runs=RUNS, order=st.randoms(use_true_random=False))
def test_the_spread_is_zero_exactly_when_there_is_one_output_in_any_order(runs, order):
    found = spread_of(runs)
    distinct = {tuple(bits(run)) for run in runs}
    assert (found.runs, found.distinct) == (len(runs), len(distinct))
    for figure in (found.vermv, found.vc, found.ulps):
        assert (figure == 0) == (len(distinct) == 1)
    shuffled = order.sample(runs[1:], len(runs) - 1)
    assert found == spread_of([runs[0], *shuffled])


def test_the_spread_keeps_a_copy_of_its_reference():
    """A call may write into the tensor that it returned before."""
    buffer, meter = torch.zeros(4), SpreadMeter()
    meter.add(buffer)
    meter.add(buffer.add_(1))
    assert meter.spread().vc == 0.5


def test_what_has_no_distance_in_ulps():
    found = measure_difference(torch.tensor([float("nan"), 1.0]), torch.tensor([2.0, 1.5]))
    assert (found.count, found.ulps, found.absolute) == (2, None, 0.5)
    found = measure_difference(torch.tensor([1, 5]), torch.tensor([1, 9]))
    assert (found.count, found.ulps, found.absolute) == (1, None, 4.0)
    found = measure_difference(torch.tensor([1 + 2j]), torch.tensor([1 + 3j]))
    assert (found.count, found.examples[0][0]) == (1, (0, 1))
