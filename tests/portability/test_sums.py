"""Sums and products are those of fractions, rounded once, in every order."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_d9m import portable
from lightning_d9m.patches.exact_sums import GUARD, plan_pieces
from lightning_d9m.patches.kernels.updates import add_rows
from lightning_d9m.portability.sums import add_terms, convolve, convolve_backward, matmul

NAN, INF = math.nan, math.inf
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
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


def read_bits(values: Tensor) -> list[int]:
    """Return the bits of numbers, of NaNs one."""
    values = torch.where(values.isnan(), NAN, values)
    return values.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[values.itemsize]).tolist()


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
    add_rows(out, torch.ones(len(others), dtype=torch.int64), values, include=True)
    assert out[0] == 7.0
    assert read_bits(out[1:]) == read_bits(expected)
    fresh = torch.full((2,), 5.0, dtype=dtype)
    every = torch.cat([values, out.new_tensor([first])])
    add_rows(fresh, torch.zeros(len(every), dtype=torch.int64), every, include=False)
    assert read_bits(fresh) == read_bits(torch.stack([expected[0] + 0.0, expected.new_zeros(())]))
    if dtype in (torch.float32, torch.float64):
        total = add_terms(every, None, keepdim=True, dtype=dtype)
        assert read_bits(total) == read_bits(expected + 0.0)


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
        add_rows(out, places[order], values[order], include=True)
        results.add(tuple(read_bits(out)))
        results.add(tuple(read_bits(out)))
    assert len(results) == 1
    inside = [values[places == place].double().tolist() for place in range(7)]
    assert out.tolist() == [add_fractions([1.0, *terms], dtype) for terms in inside]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_over_dimensions(dtype: torch.dtype) -> None:
    """Shapes as torch's, also without terms; another dtype is rounded to once."""
    values = torch.randn(3, 4, 5, dtype=torch.float64).to(dtype)
    half = torch.tensor([60000.0, 60000.0], dtype=torch.float16)
    for dims in ([0], [1, -1], [0, 1, 2], None):
        for keep in (True, False):
            wanted = values.sum(dims, keepdim=keep)
            with portable():
                actual = values.sum(dims, keepdim=keep)
            assert (actual.shape, actual.dtype) == (wanted.shape, wanted.dtype)
            torch.testing.assert_close(actual, wanted)
    with portable():
        assert torch.equal(values[:0].sum([0]), torch.zeros(4, 5, dtype=dtype))
        assert torch.equal(values.mT.sum(), values.sum())
        assert half.sum(dtype=torch.float32) == 120000.0
        assert half.sum() == INF


def test_as_many_bits_are_kept_for_any_number_of_terms() -> None:
    """And few terms with few guard bits need a single piece."""
    for dtype, digits in ((torch.float32, 23), (torch.float64, 52)):
        for size in range(2, 40):
            pieces = plan_pieces(dtype, 2**size)
            assert pieces.size == size
            kept = 52 - size + (pieces.number - 1) * (54 - size)
            assert digits + GUARD <= kept < digits + GUARD + 54
    assert plan_pieces(torch.float32, 28, 24).number == 1


@given(st.lists(FLOATS, min_size=1, max_size=20))
def test_each_running_sum_is_the_exact_sum_rounded(numbers):
    expected = [add_fractions(numbers[: n + 1], torch.float32) for n in range(len(numbers))]
    with portable():
        assert torch.tensor(numbers).cumsum(0).tolist() == expected


def test_a_running_sum_is_right_before_an_infinity():
    with portable():
        assert torch.tensor([1.0, INF, 2.0]).cumsum(0).tolist() == [1.0, INF, INF]
        large = torch.tensor([1e-280, 1.7e308, 1.7e308], dtype=torch.float64)
        assert large.cumsum(0).tolist() == [1e-280, 1.7e308, INF]


@given(st.lists(st.tuples(FLOATS, FLOATS), min_size=1, max_size=40), st.randoms())
@settings(max_examples=100, deadline=None)
def test_a_product_is_the_exact_product_rounded_in_any_order(pairs, random):
    exact = sum(Fraction(a) * Fraction(b) for a, b in pairs)
    expected = round_fraction(exact, torch.float32) if exact else 0.0
    for _ in range(2):
        left, right = torch.tensor(pairs).t()
        assert matmul(left.view(1, -1), right.view(-1, 1)).item() == expected
        random.shuffle(pairs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_products_of_special_values_are_torchs(dtype):
    rows = [[INF, 1.0], [INF, -INF], [NAN, 1.0], [3e38, 3e38], [-0.0, -0.0]]
    left, right = torch.tensor(rows, dtype=dtype), torch.tensor([[1, 2.0], [0, 1]], dtype=dtype)
    torch.testing.assert_close(matmul(left, right), left @ right, equal_nan=True)


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
