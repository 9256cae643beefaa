"""What ranks have to say is brought to the one that writes checkpoints."""

import os
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from types import SimpleNamespace

import pytest
import torch

from lightning_d9m.errors import CheckpointError
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


class Code:
    """An object that creates a folder when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_rank_0_does_not_run_code_of_another_rank(tmp_path):
    state = state_of(1, 3) | {"code": Code(tmp_path / "made")}
    with pytest.raises(CheckpointError, match="state that rank 1 sent for the checkpoint does not"):
        gather([state_of(0, 3), state])
    assert not (tmp_path / "made").exists()


def test_one_rank_asks_nobody():
    trainer = SimpleNamespace(world_size=1, global_rank=0, strategy=None)
    assert gathered.gather_values(trainer, {"a": 1}) == [{"a": 1}]
