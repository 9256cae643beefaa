"""Updates by an index where other tests do not look: shared memory, memory, half precision."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as nnf
from hypothesis import given, settings
from hypothesis import strategies as st
from patches.cases import deterministic_algorithms
from torch import Tensor

from lightning_d9m.ops.patches.kernels import updates
from lightning_d9m.ops.patches.registration import patches_applied

pytestmark = [
    pytest.mark.filterwarnings("ignore:index_reduce.* is in beta"),
    pytest.mark.filterwarnings("ignore:The reduce argument of torch.scatter"),
]
INDEX = torch.tensor([0, 1, 1])

APART: dict[str, Callable[[Tensor], object]] = {
    "index_add_": lambda x: x[:3].index_add_(0, INDEX, x[3:]),
    "scatter_reduce_": lambda x: x[:3].scatter_reduce_(0, INDEX, x[3:], "prod"),
    "put_": lambda x: x[:3].put_(INDEX, x[3:]),
    "out-self": lambda x: torch.index_reduce(x[:3], 0, INDEX, x[3:], "prod", out=x[:3]),
}


def test_half_is_rounded_once() -> None:
    """Losses and products of half precision, which torch rounds after each term."""
    scores, target = torch.randn(2, 5, 4, 3).half(), torch.randint(0, 5, (2, 4, 3))
    low, index = torch.full((1,), 1.1, dtype=torch.half), torch.zeros(6, dtype=torch.int64)
    with patches_applied("CPU"):
        loss = nnf.nll_loss(scores, target)
        products = [
            low.index_reduce(0, index, low.expand(6), "prod"),
            low.scatter_reduce(0, index, low.expand(6), "prod"),
        ]
    reference = nnf.nll_loss(scores.double(), target)
    assert abs(loss.double() - reference) <= torch.finfo(torch.half).eps * abs(reference)
    for product in products:
        assert torch.equal(product, low.float().pow(7).half())


@pytest.mark.parametrize("name", APART)
def test_parts_of_one_storage_that_do_not_meet_are_taken(name: str) -> None:
    """Both halves of a buffer."""
    expected = APART[name](torch.arange(1.0, 7))
    with patches_applied("CPU"):
        assert torch.equal(APART[name](torch.arange(1.0, 7)), expected)


def test_places_without_a_value_keep_their_bits() -> None:
    """Also next to an infinite factor, and a negative zero."""
    target = torch.tensor([-0.0, 2.0, -0.0])
    with patches_applied("CPU"):
        added = target.index_add(0, torch.tensor([1]), torch.ones(1), alpha=float("inf"))
        summed = target.scatter_add(0, torch.tensor([1]), torch.ones(1))
    for result, value in ((added, float("inf")), (summed, 3.0)):
        assert result.tolist() == [0.0, value, 0.0]
        assert result.signbit().tolist() == [True, False, True]


@settings(deadline=None, max_examples=60)
@given(
    keys=st.lists(st.integers(0, 6), min_size=1, max_size=30),
    count=st.sampled_from([7, 1000]),
    include_self=st.booleans(),
    rest=st.sampled_from([(), (2,)]),
)
def test_products_have_the_bits_of_a_loop(
    keys: list[int], count: int, include_self: bool, rest: tuple[int, ...]
) -> None:
    """From first to last, with more places than values and with fewer."""
    draws = torch.Generator().manual_seed(len(keys))
    target, values = (torch.randn(rows, *rest, generator=draws) for rows in (count, len(keys)))
    expected, seen = target.clone(), set()
    for key, value in zip(keys, values, strict=True):
        expected[key] = expected[key] * value if include_self or key in seen else value
        seen.add(key)
    with patches_applied("CPU"):
        target.index_reduce_(0, torch.tensor(keys), values, "prod", include_self=include_self)
    assert torch.equal(target, expected)


LARGE_SUMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "index_add": lambda x, index: x.index_add(0, index, x[:6]),
    "index_put": lambda x, index: x.index_put((index,), x[:6], accumulate=True),
    "scatter_add": lambda x, index: x.scatter_add(0, index[:, None].expand(6, 9), x[:6]),
    "scatter": lambda x, index: x.scatter(0, index[:, None].expand(6, 9), x[:6], reduce="add"),
}


@pytest.mark.parametrize("add", LARGE_SUMS.values(), ids=LARGE_SUMS)
def test_a_large_sum_is_torchs_where_that_needs_less_memory(add, monkeypatch) -> None:
    """An index for each row, not one for each element; and only with the flag on."""
    x, index = torch.randn(8, 9), torch.zeros(6, dtype=torch.int64)
    x[0] = 1e8 * torch.randn(9)  # torch rounds after each term
    expected = add(x, index)
    monkeypatch.setattr(updates, "_MUCH", 100)
    with patches_applied("CPU"):
        exact = add(x, index)
    with patches_applied("CPU"), deterministic_algorithms():
        found = add(x, index)
    assert not torch.equal(exact, expected)
    one_index = add in {LARGE_SUMS["index_add"], LARGE_SUMS["index_put"]}
    assert torch.equal(found, expected if one_index else exact)
