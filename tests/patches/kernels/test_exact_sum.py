"""Sums by integers: rounded once, and the same in every order."""

import math
from fractions import Fraction

import pytest
import torch
from patches.kernels.exact_cases import (
    DTYPES,
    SPECIAL,
    add_exactly,
    bits,
    make_special,
    make_terms,
    round_fraction,
)
from torch import Tensor

from lightning_d9m.patches.kernels.exact_sum import (
    GUARD,
    Limbs,
    accumulate,
    add_at,
    plan_limbs,
    sum_by_index,
)

by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def assert_sums(actual: Tensor, terms: list[list[float]]) -> None:
    """Compare with rational arithmetic; the sign of zero counts."""
    for value, numbers in zip(actual.tolist(), terms, strict=True):
        expected = add_exactly(numbers, actual.dtype)
        if math.isnan(expected):
            assert math.isnan(value)
        else:
            assert (value, math.copysign(1, value)) == (expected, math.copysign(1, expected))


@by_dtype
@pytest.mark.parametrize("spread", [0, 5, 39])
@pytest.mark.parametrize("include", [True, False])
def test_sums_are_rounded_once(dtype: torch.dtype, spread: int, include: bool) -> None:
    """Random terms whose exponents span less than the guard bits; some without an output."""
    values, index = make_terms(dtype, 400, spread), torch.randint(-1, 9, (400,))
    out = make_terms(dtype, 8, spread).view(1, 8, 1)
    terms = [values[index == place].tolist() for place in range(8)]
    if include:
        terms = [[start, *rest] for start, rest in zip(out.flatten().tolist(), terms, strict=True)]
    accumulate(out, index, values.view(1, -1, 1), include=include)
    assert_sums(out.flatten(), terms)


@by_dtype
def test_special_values(dtype: torch.dtype) -> None:
    """Zeros, infinities, NaN, ties, cancellation, overflow; each beside all others."""
    index, values = make_special(dtype)
    sums = sum_by_index(index, values.view(1, -1, 1), len(SPECIAL), dtype).flatten()
    lists = [torch.tensor(terms, dtype=dtype).tolist() for terms in SPECIAL.values()]
    for name, terms, value in zip(SPECIAL, lists, sums, strict=True):
        # Sums begin at 0.0, and so does a sum of negative zeros.
        start = [0.0, *terms] if name != "below-the-guard" else [0.0]
        assert_sums(value.view(1), [start])


@by_dtype
def test_results_near_the_limits_of_the_dtype(dtype: torch.dtype) -> None:
    """Subnormal sums, the greatest number, and half a unit above it."""
    info = torch.finfo(dtype)
    least, greatest = Fraction(info.smallest_normal * info.eps), Fraction(info.max)
    half = greatest - Fraction(round_fraction(greatest * (1 - Fraction(info.eps) / 2), dtype))
    for numbers in [
        [float(least), float(least)],
        [float(least * 3), -float(least)],
        [info.smallest_normal, -float(least)],
        [info.max, float(half) / 2],
        [info.max, float(half) / 2 * (1 - info.eps)],
        [info.max, info.max, -info.max],
        [-info.max, -info.max],
    ]:
        values = torch.tensor(numbers, dtype=dtype)
        out = torch.zeros(1, 1, 1, dtype=dtype)
        accumulate(out, torch.zeros(len(numbers)).long(), values.view(1, -1, 1), include=True)
        assert_sums(out.flatten(), [[0.0, *values.tolist()]])


@by_dtype
def test_a_thousand_orders_give_one_output(dtype: torch.dtype) -> None:
    """Also where terms are cut off, and where some are not finite."""
    values, index = make_terms(dtype, 60, 120), torch.randint(0, 4, (60,))
    values[:3] = torch.tensor([math.inf, -math.inf, math.nan], dtype=dtype)
    index[:3] = torch.tensor([0, 0, 1])
    orders = torch.stack([torch.randperm(60) for _ in range(1000)])
    sums = sum_by_index(index[orders].unsqueeze(2), values[orders].unsqueeze(2), 4, dtype)
    assert (bits(sums) == bits(sums[:1])).all()


def test_torchs_sums_depend_on_the_order() -> None:
    """The test above can fail."""
    values = torch.randn(200)
    sums = {
        float(torch.zeros(1).index_add(0, torch.zeros(200).long(), part))
        for part in (values[torch.randperm(200)] for _ in range(50))
    }
    assert len(sums) > 1


@by_dtype
def test_what_gets_no_value_keeps_its_bits(dtype: torch.dtype) -> None:
    """A NaN's payload, a negative zero; what is not included becomes 0."""
    payload = torch.zeros((), dtype=dtype)
    payload.view(bits(payload).dtype).fill_(int(bits(torch.tensor(math.nan, dtype=dtype))) + 5)
    out = torch.stack([payload, torch.tensor(-0.0, dtype=dtype), payload]).view(1, 3, 1)
    expected = bits(out).clone()
    accumulate(out, torch.tensor([2]), torch.ones(1, 1, 1, dtype=dtype), include=True)
    assert torch.equal(bits(out), expected)
    accumulate(out, torch.tensor([2]), torch.ones(1, 1, 1, dtype=dtype), include=False)
    assert bits(out).flatten().tolist() == [0, 0, int(bits(torch.ones(1, dtype=dtype)))]


@by_dtype
def test_many_equal_terms(dtype: torch.dtype) -> None:
    """Limbs carry: 2**17 terms with every bit of the significand set."""
    value = torch.tensor(2 - torch.finfo(dtype).eps, dtype=dtype)
    values = value.expand(1, 2**17, 1)
    index = torch.zeros(2**17, dtype=torch.int32)
    sums = sum_by_index(index, values, 1, torch.promote_types(dtype, torch.float32))
    assert sums.item() == round_fraction(Fraction(value.item()) * 2**17, sums.dtype)
    mixed = torch.cat([values, -values[:, :-1], value.view(1, 1, 1) * 2**-10], dim=1)
    index = torch.zeros(mixed.shape[1], dtype=torch.int32)
    expected = round_fraction(Fraction(value.item()) * Fraction(1025, 1024), sums.dtype)
    assert sum_by_index(index, mixed, 1, sums.dtype).item() == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_no_limb_overflows(dtype: torch.dtype) -> None:
    """For any number of terms, all as great as they can be; and the guard bits are all there."""
    size = 53 if dtype == torch.float64 else 24
    for power in range(1, 40):
        for terms in (2**power - 1, 2**power):
            limbs = plan_limbs(dtype, terms)
            top = max(0, size + limbs.guard - limbs.width * (limbs.number - 1))
            assert max(limbs.width, top) + terms.bit_length() <= 63
            assert limbs.guard == GUARD or terms >= 2**31
            assert limbs.guard > 0
            # What the kernel shifts stays within 64 bits.
            assert limbs.width * (limbs.number - 1) - limbs.guard + 64 >= size or top == 0
    assert plan_limbs(torch.float32, 1000) == Limbs(2, 11, GUARD)


@by_dtype
def test_few_values_for_many_places_give_the_same(dtype: torch.dtype) -> None:
    """Only the places that get a value are read; also of a strided target."""
    values, keys = make_terms(dtype, 40, 20).view(20, 2), torch.randint(0, 30, (20,))
    target = make_terms(dtype, 5 * 6 * 2, 20).view(5, 6, 2)
    whole = target.clone().view(1, 30, 2)
    accumulate(whole, keys, values.view(1, 20, 2), include=True)
    for few in (target.clone(), torch.stack([target, target], dim=1)[:, 1]):
        longer = torch.cat([few, few, few]) if few.is_contiguous() else few
        add_at(longer, longer.shape[:2], keys, values)
        assert torch.equal(bits(longer[:5].contiguous()), bits(whole.view(5, 6, 2)))


def test_empty_tensors() -> None:
    """No values, no outputs."""
    out, index = torch.ones(1, 3, 2), torch.zeros(0, dtype=torch.int64)
    accumulate(out, index, torch.ones(1, 0, 2), include=True)
    assert torch.equal(out, torch.ones(1, 3, 2))
    assert torch.equal(sum_by_index(index, torch.ones(1, 0, 2), 3, torch.half), out.half() * 0)
    assert sum_by_index(index, torch.ones(1, 0, 0), 3, torch.half).shape == (1, 3, 0)
