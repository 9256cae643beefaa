"""Bytes of ranks that are threads."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from rank_threads import RANKS, Threads

from lightning_d9m.engine.ranks import ranks as ranks_module
from lightning_d9m.engine.ranks.ranks import Ranks


def gather(data, **words):
    """Return what each rank gets, and how often the ranks waited for each other."""
    threads = Threads()

    def one(rank):
        return Ranks(rank, threads.exchange_of(rank)).gather_bytes(data[rank], **words)

    with ThreadPoolExecutor(RANKS) as pool:
        return list(pool.map(one, range(RANKS))), threads.calls


@pytest.mark.parametrize(
    ("sizes", "rounds"),
    [((3, 0, 56), 1), ((3, 57, 0), 2), ((1000, 5, 7), 2), ((3, 2100, 9), 4)],
    ids=["small", "one is larger", "the first is large", "in parts"],
)
def test_bytes_of_any_lengths(monkeypatch, sizes, rounds):
    """However large one of them is; mostly ranks wait for each other once."""
    monkeypatch.setattr(ranks_module, "_CHUNK_BYTES", 1000)
    data = [bytes([rank + 1]) * size for rank, size in enumerate(sizes)]
    assert gather(data, first=64) == ([data] * RANKS, rounds)
    (first, *others), _ = gather(data, first=64, on_first_rank=True)
    assert first == data
    assert others == [[own] for own in data[1:]]
    assert Ranks(0).gather_bytes(b"own") == [b"own"]
