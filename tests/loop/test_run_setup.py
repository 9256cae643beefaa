"""Two processes, with DDP and Accelerate: ranks agree, and a rank that differs is named."""

import os
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from rank_processes import call_on_ranks
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from trainings import NoisyDigits

from lightning_d9m import D9mError, DriftError, LedgerError, Recorder, deterministic
from lightning_d9m.comparison.ledgers import compare_ledgers
from lightning_d9m.ledger.folder import read_ledger
from lightning_d9m.loop.recorder import find_ranks

RANK = int(os.environ.get("RANK", "0"))


def prepare_ddp(model):
    """Return the model in DDP, an optimizer, a loader of this rank's part, and the backward."""
    model = DistributedDataParallel(model)
    data = NoisyDigits(64)
    loader = DataLoader(data, batch_size=16, sampler=DistributedSampler(data))
    return model, torch.optim.Adam(model.parameters(), lr=0.01), loader, torch.Tensor.backward


def prepare_accelerate(model):
    """Return what Accelerate makes of a model, an optimizer and a loader of all data."""
    accelerator = Accelerator(cpu=True)
    loader = DataLoader(NoisyDigits(64), batch_size=16, shuffle=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    return (*accelerator.prepare(model, optimizer, loader), accelerator.backward)


def train(path, disturb=lambda model: None, prepare=prepare_ddp, reference=None, state=None):
    """Train as a run of its own would; return the folder of the ledger."""
    with deterministic(seed=5, threads=1):
        model = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
        model, optimizer, loader, backward = prepare(model)
        with Recorder(path, model, optimizer, reference=reference) as run:
            if state is not None:
                run.load_state_dict(state)
            begun = run.state_dict()
            for epoch in range(2):
                for images, classes in run.batches(loader):
                    loss = nn.functional.cross_entropy(model(images), classes)
                    optimizer.zero_grad()
                    backward(loss)
                    optimizer.step()
                    run.step(loss=loss)
                    disturb(model)
                run.epoch(epoch)
    return str(run.ledger), begun


def refuse(path, **words):
    """Return the type of the error that ends a training, and what it says first."""
    with pytest.raises(D9mError) as caught:
        train(path, **words)
    return [caught.type.__name__, str(caught.value)[:14]]


def drift(path, prepare=prepare_ddp):
    """Return the rank, epoch and names of the error if one weight of rank 1 differs by one ulp."""

    def disturb(model):
        if RANK == 1:
            model.module[0].weight.data.view(torch.int32)[2, 3] += 1

    with pytest.raises(DriftError) as caught:
        train(path, disturb, prepare)
    return [caught.value.rank, caught.value.epoch, caught.value.names]


def train_all(folder):
    """Train in each of the ways; return what was found."""
    distributed.init_process_group("gloo")
    folder = Path(folder)
    first, begun = train(folder / "first")
    found = {
        "first": first,
        "second": train(folder / "second")[0],
        "drift": drift(folder / "drift"),
    }
    found["accelerated"] = [train(folder / "first", prepare=prepare_accelerate)[0] for _ in "ab"]
    found["accelerated drift"] = drift(folder / "drift", prepare_accelerate)
    (folder / "file").write_text("")
    with pytest.raises(LedgerError):
        train(folder / "file/below")
    found["refused"] = [
        refuse(
            folder / "refused", reference=[first, folder / "missing"][RANK]
        ),  # which 1 cannot read
        refuse(folder / "refused", state=begun | {"rank": 0}),
    ]
    distributed.destroy_process_group()
    return found


def test_two_ranks(tmp_path):
    one, other = call_on_ranks(train_all, 2, tmp_path)
    of_peers, of_own = one.pop("refused"), other.pop("refused")
    assert of_peers == [["D9mError", "Rank 1 failed,"]] * 2
    assert [kind for kind, _ in of_own] == ["LedgerError", "CheckpointError"]
    assert one == other
    for folders in ([one["first"], one["second"]], one["accelerated"]):
        ledgers = [read_ledger(folder) for folder in folders]
        assert list(ledgers[0].files) == [0, 1]
        assert compare_ledgers(*ledgers).verdict == "equal"
        losses = [ledgers[0].outcome(rank).last.loss for rank in (0, 1)]
        assert losses[0] != losses[1]  # each rank has a part of the data
    assert one["drift"] == [1, 0, ["0.weight"]]
    assert one["accelerated drift"] == [1, 0, ["0.weight"]]


def test_without_a_group_there_is_one_rank():
    ranks, size = find_ranks()
    assert (ranks.rank, ranks.is_alone, size) == (0, True, 1)
