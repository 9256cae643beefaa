"""Remainders are exact, and results have torch's types."""

import math

import pytest
import torch

from lightning_d9m import portable

WHOLE = torch.arange(6)
# Numbers, an operation, and its exact result.
REMAINDERS = [
    (torch.tensor([1.0, -1.0]).double(), 0.1, torch.remainder, [1.0 % 0.1, -1.0 % 0.1]),
    (torch.tensor([1e20, 1e12, -1e20]), 360.0, torch.remainder, [272.0, 144.0, 88.0]),
    (torch.tensor([1e20, -1e20]), 360.0, torch.fmod, [272.0, -272.0]),
    (torch.tensor([1.0]).double(), 0.1, torch.floor_divide, [1.0 // 0.1]),
    (torch.tensor([5.0, -5.0]), math.inf, torch.remainder, [5.0, math.inf]),
    # Torch rounds numbers to the type of the result first.
    (torch.tensor([1.0]).half(), 0.1, torch.fmod, [2.0**-12]),
    (torch.tensor([2**15 - 1]).short(), torch.tensor([7.0]).half(), torch.remainder, [1.0]),
    (WHOLE, 0.5, torch.floor_divide, [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]),
    (WHOLE, 1.5, torch.remainder, [0.0, 1.0, 0.5, 0.0, 1.0, 0.5]),
    (WHOLE, -1.5, torch.fmod, [0.0, 1.0, 0.5, 0.0, 1.0, 0.5]),
    (-WHOLE, 1.5, lambda x, y: x.div(y, rounding_mode="trunc"), [0.0, 0.0, -1.0, -2.0, -2.0, -3.0]),
]


@pytest.mark.parametrize(("left", "right", "function", "expected"), REMAINDERS)
def test_remainders_are_exact(left, right, function, expected):
    with portable():
        found = function(left, right)
    assert found.dtype == torch.result_type(left, right)
    assert found.tolist() == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_any_rest_is_that_of_c(dtype):
    """Torch's own is NaN where a quotient is large, or not, as the processor has it."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**63), 2**63 - 1, (2, 2000), generator=generator)
    left, right = (one[one.isfinite() & (one != 0)][:1500] for one in bits.view(dtype))
    with portable():
        found = torch.fmod(left, right)
    assert found.tolist() == [*map(math.fmod, left.tolist(), right.tolist())]


def test_a_weight_keeps_its_bits_beside_values_of_16():
    """Autograd converts a gradient of 16 bits to the type of its weight without a word."""
    values = torch.arange(12.0).view(4, 3).bfloat16() / 7
    weights = torch.ones(2, 3, requires_grad=True)
    gradients = []
    for x in (values, values.float()):
        with portable():
            out = torch.nn.functional.layer_norm(x, (3,), *weights)
            gradients += torch.autograd.grad((out.float() * 3).sum(), weights)
    assert torch.equal(*gradients)


TYPES = {
    "group norm": lambda x: torch.nn.GroupNorm(2, 4)(x.view(1, 4, 2)),
    "copysign": lambda x: torch.copysign(x, WHOLE[:4].repeat(2)),
    "remainder": lambda x: x % 0.3,
    "root of a number": lambda x: x[2].rsqrt(),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("function", TYPES.values(), ids=TYPES)
def test_numbers_keep_their_type(function, dtype):
    values = torch.arange(8.0).to(dtype)
    expected = function(values)
    with portable():
        found = function(values)
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)
