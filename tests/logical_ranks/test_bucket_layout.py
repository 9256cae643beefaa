"""The places of gradients in buckets."""

from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_d9m.logical_ranks.buckets import lay_out


@settings(deadline=None)
@given(st.lists(st.integers(0, 50) | st.just(2**14), min_size=1, max_size=12), st.integers(0, 400))
def test_layout_holds_every_parameter_once_and_aligned(sizes, limit):
    """Slots do not overlap, begin at multiples of 64 bytes, and go from last to first.

    Within a bucket, the large ones come before the small ones.
    """
    named = [(str(i), nn.Parameter(torch.zeros(size))) for i, size in enumerate(sizes)]
    buckets = lay_out(named, limit)
    names = iter(reversed(named))
    for bucket in buckets:
        taken = [next(names) for _ in bucket.slots]
        small = [name for name, parameter in taken if parameter.nbytes < 2**16]
        large = [name for name, parameter in taken if parameter.nbytes >= 2**16]
        assert [slot.name for slot in bucket.slots] == large + small
        assert bucket.large == len(large)
    assert next(names, None) is None
    for bucket in buckets:
        edges = [(slot.start, slot.stop) for slot in bucket.slots]
        assert all(start % 16 == 0 for start, _ in edges)
        assert all(a[1] == b[0] for a, b in pairwise(edges))
        assert all(slot.view.shape == slot.parameter.shape for slot in bucket.slots)
        last = min(bucket.slots, key=lambda slot: int(slot.name))
        held = sum(slot.parameter.numel() * 4 for slot in bucket.slots if slot is not last)
        assert held < max(limit, 1)
