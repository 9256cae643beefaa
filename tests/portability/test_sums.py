"""Sums at places are those of fractions, rounded once, in every order."""

import math
from fractions import Fraction
from unittest.mock import patch

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from kernel_inputs import read_bits
from torch import Tensor

from lightning_d9m.ops.patches.exact_sums import GUARD, plan_pieces
from lightning_d9m.ops.patches.kernels.updates import add_rows
from lightning_d9m.ops.patches.triton.launch import natives
from lightning_d9m.ops.portability import kernels

NAN, INF = math.nan, math.inf
assert kernels.KERNEL in natives  # C computes the sums of float32 and float64 numbers
NO_KERNELS = patch.dict(natives, clear=True)
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
SPECIAL = [0.0, -0.0, 1.0, -1.0, INF, -INF, NAN]


def round_fraction(value: Fraction, dtype: torch.dtype) -> float:
    """Return a fraction rounded to nearest, ties to even; it is not zero."""
    info = torch.finfo(dtype)
    bits = round(-math.log2(info.eps)) + 1
    exponent = math.floor(math.log2(abs(value.numerator)) - math.log2(value.denominator))
    exponent += (abs(value) >= Fraction(2) ** (exponent + 1)) - (
        abs(value) < Fraction(2) ** exponent
    )
    unit = Fraction(2) ** (max(exponent, round(math.log2(info.smallest_normal))) - bits + 1)
    rounded = round(value / unit) * unit
    if abs(rounded) > info.max:
        return INF if value > 0 else -INF
    return float(rounded)


def add_fractions(terms: list[float], dtype: torch.dtype) -> float:
    """Return the sum of the terms; that of -0.0 alone is -0.0."""
    special = [term for term in terms if not math.isfinite(term)]
    if special:
        return sum(special)
    total = sum(map(Fraction, terms))
    return round_fraction(total, dtype) if total else sum(terms, -0.0) * 0.0


@st.composite
def drawn_terms(draw: st.DrawFn, dtype: torch.dtype) -> Tensor:
    """Return terms that span at most the guard bits, from anywhere in the range of a dtype."""
    info = torch.finfo(dtype)
    least = round(math.log2(info.smallest_normal * info.eps))
    base = draw(st.integers(least, math.floor(math.log2(info.max))))
    one = st.builds(
        lambda fraction, down: math.ldexp(fraction, max(base - down, least)),
        st.floats(-1, 1),
        st.integers(0, GUARD - 25),
    )
    special = st.sampled_from([0.0, -0.0])
    rare = st.sampled_from(SPECIAL)
    terms = draw(st.lists(st.one_of(one, one, one, special), max_size=20))
    if draw(st.integers(0, 9)) == 0:
        terms = draw(st.lists(st.one_of(one, rare), max_size=6))
    return torch.tensor(terms, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_sums_are_rounded_once(dtype: torch.dtype, data: st.DataObject) -> None:
    """Into places that hold a term or nothing, and over dimensions, in any order of the terms."""
    terms = data.draw(drawn_terms(dtype))
    first, *others = terms.tolist() or [0.0]
    finite = [abs(term) for term in (first, *others) if term and math.isfinite(term)]
    assume(not finite or max(finite) / min(finite) <= 2.0**GUARD)
    expected = torch.tensor([add_fractions([first, *others], dtype)], dtype=torch.float64).to(dtype)
    order = data.draw(st.permutations(range(len(others))))
    values = torch.tensor(others, dtype=dtype)[order]
    out = torch.tensor([7.0, first], dtype=dtype)
    by_torch = out.clone()
    add_rows(out, torch.ones(len(others), dtype=torch.int64), values, include=True)
    assert out[0] == 7.0
    assert read_bits(out[1:]) == read_bits(expected)
    with NO_KERNELS:
        add_rows(by_torch, torch.ones(len(others), dtype=torch.int64), values, include=True)
    assert read_bits(by_torch) == read_bits(out)
    fresh = torch.full((2,), 5.0, dtype=dtype)
    every = torch.cat([values, out.new_tensor([first])])
    add_rows(fresh, torch.zeros(len(every), dtype=torch.int64), every, include=False)
    assert read_bits(fresh) == read_bits(torch.stack([expected[0] + 0.0, expected.new_zeros(())]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_orders_agree_beyond_the_guard_bits(dtype: torch.dtype) -> None:
    """Terms over 300 binary orders of magnitude, many times the same places, shuffled."""
    torch.manual_seed(0)
    scales = torch.randint(-120, 120, (3000,)).double()
    values = (torch.randn(3000).double() * scales.exp2()).to(dtype)
    places = torch.randint(9, (3000,))  # beyond the last of 7, too
    results = set()
    for _ in range(20):
        order = torch.randperm(3000)
        out = torch.ones(7, dtype=dtype)
        by_torch = out.clone()
        add_rows(out, places[order], values[order], include=True)
        with NO_KERNELS:
            add_rows(by_torch, places[order], values[order], include=True)
        results |= {tuple(read_bits(out)), tuple(read_bits(by_torch))}
    assert len(results) == 1
    inside = [values[places == place].double().tolist() for place in range(7)]
    assert out.tolist() == [add_fractions([1.0, *terms], dtype) for terms in inside]


def test_an_empty_view_behind_the_end_adds_nothing() -> None:
    values, index = torch.zeros(0, 3)[:, 1:], torch.zeros(0, dtype=torch.int64)
    for sums in ({}, natives.copy()):
        out = torch.ones(4, 2)
        with patch.dict(natives, sums, clear=True):
            add_rows(out, index, values, include=True)
        assert torch.equal(out, torch.ones(4, 2))


def test_as_many_bits_are_kept_for_any_number_of_terms() -> None:
    """And few terms with few guard bits need a single piece."""
    for dtype, digits in ((torch.float32, 23), (torch.float64, 52)):
        for size in range(2, 40):
            pieces = plan_pieces(dtype, 2**size)
            assert pieces.size == size
            kept = 52 - size + (pieces.number - 1) * (54 - size)
            assert digits + GUARD <= kept < digits + GUARD + 54
    assert plan_pieces(torch.float32, 28, 24).number == 1
