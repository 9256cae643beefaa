"""Sums and products are compared with fractions."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_d9m import portable
from lightning_d9m.portability.products import convolve, convolve_backward, matmul
from lightning_d9m.portability.sums import add_terms

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


def round_fraction(exact):
    """Round a fraction to float32, ties to even."""
    if abs(exact) >= Fraction(2) ** 128 - Fraction(2) ** 103:
        return math.copysign(math.inf, exact)
    exponent = -149
    while abs(exact) >= Fraction(2) ** (exponent + 24):
        exponent += 1
    return float(round(exact / Fraction(2) ** exponent) * Fraction(2) ** exponent)


def add_values(values, dims=None):
    return add_terms(values, dims, keepdim=False, dtype=torch.float32)


@given(st.lists(FLOATS, min_size=1, max_size=40), st.randoms())
@settings(max_examples=100, deadline=None)
def test_a_sum_is_the_exact_sum_rounded_in_any_order(numbers, random):
    expected = round_fraction(sum(map(Fraction, numbers)))
    assert add_values(torch.tensor(numbers)).item() == expected
    random.shuffle(numbers)
    assert add_values(torch.tensor(numbers)).item() == expected


@given(st.lists(FLOATS, min_size=1, max_size=20))
def test_each_running_sum_is_the_exact_sum_rounded(numbers):
    expected = [round_fraction(sum(map(Fraction, numbers[: n + 1]))) for n in range(len(numbers))]
    with portable():
        assert torch.tensor(numbers).cumsum(0).tolist() == expected


def test_a_running_sum_is_right_before_an_infinity():
    with portable():
        assert torch.tensor([1.0, math.inf, 2.0]).cumsum(0).tolist() == [1.0, math.inf, math.inf]
        large = torch.tensor([1e-280, 1.7e308, 1.7e308], dtype=torch.float64)
        assert large.cumsum(0).tolist() == [1e-280, 1.7e308, math.inf]


@given(st.lists(st.tuples(FLOATS, FLOATS), min_size=1, max_size=40), st.randoms())
@settings(max_examples=100, deadline=None)
def test_a_product_is_the_exact_product_rounded_in_any_order(pairs, random):
    expected = round_fraction(sum(Fraction(a) * Fraction(b) for a, b in pairs))
    for _ in range(2):
        left, right = torch.tensor(pairs).t()
        assert matmul(left.view(1, -1), right.view(-1, 1)).item() == expected
        random.shuffle(pairs)


def test_cancellation_leaves_what_is_small():
    values = torch.tensor([1e30, 1.0, -1e30, 2.0**-140])
    assert add_values(values).item() == 1.0
    matrix = torch.tensor([[1e20, 3.0, -1e20]])
    assert matmul(matrix, torch.tensor([[1e15], [1e-30], [1e15]])).item() == pytest.approx(3e-30)


def test_special_values():
    inf, nan = math.inf, math.nan
    values = torch.tensor([[inf, 1.0], [inf, -inf], [nan, 1.0], [3e38, 3e38], [-0.0, -0.0]])
    result = add_values(values, [1])
    assert result.isnan().tolist() == [False, True, True, False, False]
    assert result[[0, 3]].tolist() == [inf, inf]
    assert not torch.signbit(result[4])
    product = matmul(values, torch.tensor([[1.0], [0.0]]))[:, 0]
    assert product.isnan().tolist() == [False, True, True, False, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_blocks_and_permutations_of_products_agree(dtype):
    generator = torch.Generator().manual_seed(1)
    left = torch.randn(6, 1500, generator=generator, dtype=dtype)
    right = torch.randn(1500, 5, generator=generator, dtype=dtype)
    expected = matmul(left, right)
    order = torch.randperm(1500, generator=generator)
    assert torch.equal(matmul(left[:, order], right[order]), expected)
    assert torch.equal(matmul(left[2:4], right[:, 1:2]), expected[2:4, 1:2])
    wide = (left.double() @ right.double()).to(dtype)
    torch.testing.assert_close(
        expected, wide, rtol=1e-13 if dtype == torch.float64 else 1e-7, atol=1e-12
    )


def test_float64_products_keep_special_values():
    left = torch.tensor([[math.inf, 1.0], [math.nan, 0.0], [1e300, 1e300]], dtype=torch.float64)
    right = torch.tensor([[1.0, 0.0], [2.0, 1.0]], dtype=torch.float64)
    torch.testing.assert_close(matmul(left, right), left @ right, equal_nan=True)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_convolutions_agree_with_torch(dims, groups, transposed):
    name = f"conv{'_transpose' if transposed else ''}{dims}d"
    generator = torch.Generator().manual_seed(2)
    given = ([2], [1], [2], transposed, [1] if transposed else [0], groups)
    channels = (4, 6 // groups) if transposed else (6, 4 // groups)
    values = torch.randn(3, 4, *[9, 8, 7][:dims], generator=generator, requires_grad=True)
    weight = torch.randn(*channels, *[3, 2, 3][:dims], generator=generator, requires_grad=True)
    options = {"output_padding": 1} if transposed else {}
    function = getattr(torch.nn.functional, name)
    out = function(values, weight, None, 2, 1, groups=groups, dilation=2, **options)
    gradient = torch.randn(out.shape, generator=generator)
    expected = torch.autograd.grad(out, (values, weight), gradient)
    with torch.no_grad():
        torch.testing.assert_close(convolve(values, weight, None, *given), out)
        found = convolve_backward(gradient, values, weight, None, *given, (True, True, False))[:2]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    whole = convolve(values.detach(), weight.detach(), None, *given)
    assert torch.equal(convolve(values.detach()[1:2], weight.detach(), None, *given), whole[1:2])
