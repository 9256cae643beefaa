"""Segmented reductions: the bits of a loop from first to last."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_d9m.control.threads import threads_pinned
from lightning_d9m.patches.primitives import segment_reduce
from lightning_d9m.patches.primitives.segment_reduce import (
    find_last,
    multiply_into,
    sum_segments,
)

keys_of = st.lists(st.integers(-2, 7), max_size=60)


def loop(keys: list[int], values: Tensor, sums: Tensor) -> Tensor:
    """Add one element after the other."""
    for key, value in zip(keys, values, strict=True):
        if 0 <= key < len(sums):
            sums[key] += value
    return sums


@settings(deadline=None, max_examples=60)
@given(keys=keys_of, seed=st.integers(0, 9), features=st.sampled_from([0, 1, 3]))
def test_sums_have_the_bits_of_a_loop(keys: list[int], seed: int, features: int) -> None:
    """Any keys, of which some name no output; vectors and rows."""
    shape = (len(keys), features) if features else (len(keys),)
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    expected = loop(keys, values, torch.zeros(6, *shape[1:]))
    actual = sum_segments(torch.tensor(keys, dtype=torch.int64), values, 6)
    assert torch.equal(actual, expected)


@settings(deadline=None, max_examples=60)
@given(keys=keys_of)
def test_last_is_the_last(keys: list[int]) -> None:
    """Every element points at the last one with its key."""
    last = {key: place for place, key in enumerate(keys)}
    found = find_last(torch.tensor(keys, dtype=torch.int64), 8)
    assert found.tolist() == [last[key] for key in keys]


@settings(deadline=None, max_examples=60)
@given(
    keys=st.lists(st.integers(0, 6), min_size=1, max_size=30),
    count=st.sampled_from([7, 1000]),
    whole=st.booleans(),
    include_self=st.booleans(),
    rest=st.sampled_from([(), (2,)]),
)
def test_an_update_has_the_bits_of_a_loop(
    keys: list[int], count: int, whole: bool, include_self: bool, rest: tuple[int, ...]
) -> None:
    """With more places than values and with fewer; integers overflow alike in any order."""
    draws = torch.Generator().manual_seed(len(keys))
    target, values = (torch.randn(rows, *rest, generator=draws) for rows in (count, len(keys)))
    if whole:
        target, values = (target * 1e9).long(), (values * 1e9).long()
    expected, seen = target.clone(), set()
    for key, value in zip(keys, values, strict=True):
        expected[key] = expected[key] * value if include_self or key in seen else value
        seen.add(key)
    where = torch.tensor(keys)
    multiply_into(target, (where,), where, count, values, include_self=include_self)
    assert torch.equal(target, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_low_precision_is_added_in_float32(dtype: torch.dtype) -> None:
    """3,000 ones are 3,000, where half would stop at 2,048 and bfloat16 at 256."""
    ones = torch.ones(3000, dtype=dtype)
    assert sum_segments(torch.zeros(3000, dtype=torch.int64), ones, 1).tolist() == [3000.0]


def test_keys_that_need_64_bits_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond 2**31 outputs the keys are sorted as they are."""
    keys, values = torch.randint(-1, 9, (200,)), torch.randn(200)
    short = sum_segments(keys, values, 9)
    monkeypatch.setattr(segment_reduce, "_INT32_LIMIT", 0)
    assert torch.equal(sum_segments(keys, values, 9), short)


def test_long_and_short_runs_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """A vector reduced as one or as rows of one feature: on a CPU the same bits."""
    keys, values = torch.randint(0, 2, (1000,)), torch.randn(1000)
    long = sum_segments(keys, values, 2)
    monkeypatch.setattr(segment_reduce, "_LONG", 10**6)
    assert torch.equal(sum_segments(keys, values, 2), long)


def test_thread_count_does_not_matter() -> None:
    """Many elements on few outputs: the same bits on one thread and on four."""
    keys, values = torch.randint(0, 50, (20_000,)), torch.randn(20_000, 4)
    with threads_pinned(1):
        alone = sum_segments(keys, values, 50)
    with threads_pinned(4):
        assert torch.equal(sum_segments(keys, values, 50), alone)
