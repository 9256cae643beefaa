"""Updates of places by values in order: the bits of a loop from first to last."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_d9m.patches.registration import patches_applied


@pytest.mark.filterwarnings("ignore:index_reduce.* is in beta")
@settings(deadline=None, max_examples=60)
@given(
    keys=st.lists(st.integers(0, 6), min_size=1, max_size=30),
    count=st.sampled_from([7, 1000]),
    include_self=st.booleans(),
    rest=st.sampled_from([(), (2,)]),
)
def test_an_update_has_the_bits_of_a_loop(
    keys: list[int], count: int, include_self: bool, rest: tuple[int, ...]
) -> None:
    """With more places than values and with fewer."""
    draws = torch.Generator().manual_seed(len(keys))
    target, values = (torch.randn(rows, *rest, generator=draws) for rows in (count, len(keys)))
    expected, seen = target.clone(), set()
    for key, value in zip(keys, values, strict=True):
        expected[key] = expected[key] * value if include_self or key in seen else value
        seen.add(key)
    where = torch.tensor(keys)
    with patches_applied("CPU"):
        target.index_reduce_(0, where, values, "prod", include_self=include_self)
    assert torch.equal(target, expected)
