"""How far two tensors are apart, in bytes, values and places."""

import pytest
import torch

from lightning_d9m.comparison.magnitude import measure


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_one_ulp_is_one_in_every_dtype(dtype):
    one = torch.linspace(-2, 2, 12, dtype=dtype).reshape(3, 4)
    other = one.clone()
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[one.element_size()]
    other.view(bits)[1, 2] += 1
    found = measure(one, other)
    assert (found.count, found.total, found.ulps) == (1, 12, 1)
    assert found.examples[0][0] == (1, 2)


def test_zero_and_minus_zero_differ_and_are_neighbours():
    found = measure(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert (found.count, found.ulps, found.absolute) == (1, 0, 0.0)


def test_across_zero_the_floats_between_are_counted():
    tiny = torch.tensor([2.0**-149])
    assert measure(tiny, -tiny).ulps == 2


def test_no_number_has_no_distance():
    found = measure(torch.tensor([float("nan"), 1.0]), torch.tensor([2.0, 1.5]))
    assert (found.count, found.ulps, found.absolute) == (2, None, 0.5)


def test_whole_numbers_and_complex_ones():
    found = measure(torch.tensor([1, 5]), torch.tensor([1, 9]))
    assert (found.count, found.ulps, found.absolute) == (1, None, 4.0)
    found = measure(torch.tensor([1 + 2j]), torch.tensor([1 + 3j]))
    assert (found.count, found.examples[0][0]) == (1, (0, 1))


def test_equal_bytes_differ_nowhere():
    found = measure(torch.tensor([float("nan")]), torch.tensor([float("nan")]))
    assert (found.count, found.examples) == (0, ())


@pytest.mark.parametrize("other", [torch.ones(2, 1), torch.ones(2, dtype=torch.float64)])
def test_another_shape_or_dtype_is_not_measured(other):
    assert measure(torch.ones(2), other) is None
