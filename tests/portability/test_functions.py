"""Elementary functions are compared with mpmath, which torch brings through sympy."""

import math

import mpmath
import pytest
import torch

import lightning_d9m
from lightning_d9m.ops.patches.triton.language import sqrt
from lightning_d9m.ops.portability.arithmetic import evaluate
from lightning_d9m.ops.portability.formulas import FUNCTIONS

OF_TWO = ("pow", "atan2", "hypot", "fmod", "remainder", "floor_divide")
OTHERS = ("normal", "sqrt", "gelu", "gelu_backward", "silu", "silu_backward")
OF_ONE = sorted(FUNCTIONS.keys() - {*OF_TWO, *OTHERS})
REFERENCES = {
    "exp2": lambda x: mpmath.mpf(2) ** x,
    "log2": lambda x: mpmath.log(x, 2),
    "sigmoid": lambda x: 1 / (1 + mpmath.exp(-x)),
    "gelu": lambda x: x * mpmath.erfc(-x / mpmath.sqrt(2)) / 2,
    "silu": lambda x: x / (1 + mpmath.exp(-x)),
}
DOMAINS = {
    **dict.fromkeys(("acos", "asin", "atanh", "erfinv"), (-1, 1)),
    **dict.fromkeys(("log", "log2", "log10"), (0, math.inf)),
    "acosh": (1, math.inf),
    "log1p": (-1, math.inf),
}
SPECIAL = [0.0, -0.0, math.inf, -math.inf, math.nan, 1.0, -1.0, 1e-30, -1e-30]


def sample(count):
    generator = torch.Generator().manual_seed(3)
    bits = torch.randint(-(2**31), 2**31, (count,), generator=generator)
    anything = bits.to(torch.int32).view(torch.float32)
    near = torch.randn(count, generator=generator) * 3
    return torch.cat([anything[anything.isfinite()], near, near * 1e-3, near.abs() / 8])


@pytest.mark.parametrize("name", [*OF_ONE, "gelu", "silu"])
def test_errors_are_below_one_unit(name):
    """Float32 results are off by hardly more than half a unit, float64 ones by 2**-42 of them."""
    reference = REFERENCES.get(name) or getattr(mpmath, name)
    low, high = DOMAINS.get(name, (-math.inf, math.inf))
    values = [x for x in sample(40).tolist() if low < x < high]
    results = evaluate(name, torch.tensor(values)).tolist()
    wide = evaluate(name, torch.tensor(values, dtype=torch.float64)).tolist()
    with mpmath.workprec(200):
        for value, result, other in zip(values, results, wide, strict=True):
            exact = reference(mpmath.mpf(value))
            if abs(exact) < 2.0**1023:
                assert abs(other - exact) <= 2.0**-42 * abs(exact) + 2.0**-1070, (value, other)
            if abs(exact) >= 2.0**128:
                assert abs(result) == math.inf
                continue
            exponent = mpmath.frexp(exact)[1] if exact else 0
            unit = mpmath.mpf(2) ** max(exponent - 24, -149)
            assert abs(result - exact) <= 0.501 * unit, (value, result)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", [*OF_ONE, *OF_TWO])
def test_special_values_are_those_of_torch(name, dtype):
    values = [torch.tensor([*SPECIAL, 3e38, -3e38], dtype=dtype)]
    if name in OF_TWO:
        numbers = torch.tensor([*SPECIAL, 2, -2, 0.5, -0.5, 3, -3, 1e30], dtype=dtype)
        values = [one.flatten() for one in torch.meshgrid(numbers, numbers, indexing="ij")]
    expected = getattr(torch, name)(*(one.double() for one in values)).to(dtype)
    result = evaluate(name, *values)
    torch.testing.assert_close(result, expected, rtol=2e-7, atol=0, equal_nan=True)
    zero = expected == 0
    assert torch.equal(torch.signbit(result[zero]), torch.signbit(expected[zero]))


def test_large_angles_lose_no_digit():
    """Also where a number is nearly a multiple of pi / 2."""
    values = [1e22, 2.0**120, 6381956970095103 * 2.0**797, 1e300, -(2.0**20), 2.0**55 + 8]
    for name in ("sin", "cos", "tan"):
        results = evaluate(name, torch.tensor(values, dtype=torch.float64)).tolist()
        with mpmath.workprec(2000):
            for value, result in zip(values, results, strict=True):
                exact = getattr(mpmath, name)(mpmath.mpf(value))
                assert abs(result - exact) <= 2.0**-50 * max(1, abs(exact) ** 2), (name, value)


def test_the_root_of_float64_is_correctly_rounded():
    bits = torch.randint(0, 0x7FF0 << 48, (20_000,), generator=torch.Generator().manual_seed(0))
    values = bits.view(torch.float64)
    expected = [math.sqrt(value) for value in values.tolist()]
    assert sqrt(values).tolist() == evaluate("sqrt", values).tolist() == expected


def test_float64_numbers_divide_by_all_digits_of_a_number():
    numbers = torch.arange(1.0, 999, dtype=torch.bfloat16)
    with lightning_d9m.portable():
        assert (torch.tensor([1.0], dtype=torch.float64) / 3.3).item() == 1 / 3.3
        halves = numbers / 3.3
    assert torch.equal(halves, numbers / 3.3)
