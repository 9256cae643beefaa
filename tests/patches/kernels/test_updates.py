"""Updates of places by values in order: the bits of a loop from first to last."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_d9m.patches.kernels.updates import find_last, update_rows

keys_of = st.lists(st.integers(0, 7), max_size=60)


@settings(deadline=None, max_examples=60)
@given(keys=keys_of)
def test_last_is_the_last(keys: list[int]) -> None:
    """Of each key; there may be none."""
    last = {key: place for place, key in enumerate(keys)}
    found = find_last(torch.tensor(keys, dtype=torch.int64), 8)
    assert found.tolist() == [last.get(key, -1) for key in range(8)]


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
    update_rows(target, where, values, "prod", include_self=include_self)
    assert torch.equal(target, expected)
