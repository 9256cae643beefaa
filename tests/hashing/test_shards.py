"""The digest of a tensor follows from the shards of ranks, wherever these end."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_d9m import digest
from lightning_d9m.engine.hashing.shards import FlatLayout, combine_shards, read_shards
from lightning_d9m.errors import DigestError

CHUNK = 131072


def divide(tensor, cuts):
    """Return the shards of ranks that hold what lies between cuts, counted in elements."""
    flat = tensor.reshape(-1)
    bounds = [0, *sorted(cuts), len(flat)]
    ranks = range(len(bounds) - 1)
    return [
        FlatLayout(tensor.shape, begin, flat[begin:end], ranks).find_shard(flat[begin:end])
        for begin, end in pairwise(bounds)
    ]


def combine(shards):
    return combine_shards(shards[0].header, shards[0].size, read_shards(shards))


ELEMENTS = st.integers(0, 5 * CHUNK // 2)


@given(
    size=ELEMENTS,
    near=st.lists(st.tuples(st.integers(0, 5), st.integers(-3, 3)), max_size=5),
    cuts=st.lists(ELEMENTS, max_size=4),
)
def test_any_division_gives_the_digest_of_the_whole(size, near, cuts):
    tensor = torch.arange(size, dtype=torch.int32).to(torch.int16)
    at_chunks = [number * CHUNK // 2 + offset for number, offset in near]
    cuts = [min(max(cut, 0), size) for cut in (*at_chunks, *cuts)]
    assert combine(divide(tensor, cuts)) == digest(tensor)


@pytest.mark.parametrize("kept", [(1, 2), (0, 2), (0, 1), (0, 0, 1), (0, 1, 1, 2)])
def test_shards_that_leave_a_gap_or_overlap_have_no_digest(kept):
    shards = divide(torch.zeros(100_000), [33_000, 66_000])
    with pytest.raises(DigestError, match="The shards of a tensor do not cover it: it has 400,000"):
        combine([shards[number] for number in kept])


def test_reading_leaves_the_storage_resizable():
    """FSDP frees and allocates storages; one that NumPy has seen cannot be resized."""
    tensor = torch.zeros(100)
    read_shards(divide(tensor, [50]))
    tensor.untyped_storage().resize_(0)


def test_a_shard_whose_memory_was_freed_has_no_digest():
    tensor = torch.zeros(70_000)
    shards = divide(tensor, [35_000])
    tensor.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="storage"):
        read_shards(shards)


def test_a_tensor_that_consists_of_others_has_no_shard():
    layout = FlatLayout((8,), 0, torch.zeros(4), (0, 1))
    assert layout.find_shard(torch.zeros(4).to_sparse()) is None
