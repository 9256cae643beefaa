"""What ranks have to say is brought to the one that writes checkpoints."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from types import SimpleNamespace

import pytest
import torch

from lightning_d9m.errors import RanksDisagreeError
from lightning_d9m.lightning.ranks import gather as gathered


def gather(states):
    """Let each rank, a thread of this process, gather its state; return what each got."""
    barrier = Barrier(len(states))
    slots = [None] * len(states)
    calls = []

    def all_gather(rank, part):
        slots[rank] = part
        barrier.wait(timeout=60)
        together = torch.stack(slots)
        calls.append(len(part))
        barrier.wait(timeout=60)
        return together

    def act(rank):
        strategy = SimpleNamespace(
            root_device=torch.device("cpu"), all_gather=lambda part: all_gather(rank, part)
        )
        trainer = SimpleNamespace(
            strategy=strategy,
            world_size=len(states),
            global_rank=rank,
            is_global_zero=rank == 0,
        )
        return gathered.gather_values(trainer, states[rank])

    with ThreadPoolExecutor(len(states)) as pool:
        return list(pool.map(act, range(len(states)))), calls


def state_of(rank, size):
    return {"rank": rank, "words": torch.arange(size) + rank, "name": f"rank {rank}", "none": None}


@pytest.mark.parametrize(
    ("sizes", "rounds"),
    [((3, 5), 1), ((3, 20_000, 0), 2), ((20_000, 5, 7), 2), ((3, 30_000, 9), 3)],
    ids=["small", "one is large", "the first is large", "in parts"],
)
def test_rank_0_gets_all(monkeypatch, sizes, rounds):
    """However large one of them is; mostly ranks wait for each other once."""
    monkeypatch.setattr(gathered, "_CHUNK", 100_000)
    states = [state_of(rank, size) for rank, size in enumerate(sizes)]
    (first, *others), calls = gather(states)
    assert repr(first) == repr(states)
    assert all(torch.equal(a["words"], b["words"]) for a, b in zip(first, states, strict=True))
    assert len(calls) == rounds * len(sizes)
    # Who does not save keeps its own alone.
    assert [[state["rank"] for state in own] for own in others] == [
        [n] for n in range(1, len(sizes))
    ]


def test_rank_0_refuses_other_bytes(monkeypatch):
    """``test_plain_data`` shows that they are not unpickled."""
    monkeypatch.setattr(gathered, "encode_plain", lambda _: b"\x80\x04")
    with pytest.raises(RanksDisagreeError, match="Another rank sent 2 bytes that are not plain"):
        gather([state_of(0, 3), state_of(1, 3)])


def test_checkpoints_alone_call_torch_save(monkeypatch):
    """Programs that replace or count ``torch.save`` see Lightning's own calls only."""
    monkeypatch.setattr(torch, "save", None)
    monkeypatch.setattr(torch, "load", None)
    (first, _), _ = gather([state_of(0, 3), state_of(1, 3)])
    assert [state["name"] for state in first] == ["rank 0", "rank 1"]


def test_one_rank_asks_nobody():
    trainer = SimpleNamespace(world_size=1, global_rank=0, strategy=None)
    assert gathered.gather_values(trainer, {"a": 1}) == [{"a": 1}]
