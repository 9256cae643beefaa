"""One rank of loops with DDP and with Accelerate, on Gloo; see loop/test_ranks.py."""

import contextlib
import json
import os
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from trainings import NoisyDigits

from lightning_d9m import D9mError, DriftError, LedgerError, Recorder, deterministic

RANK = int(os.environ["RANK"])
folder = Path(sys.argv[1])
states = []


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


def train(name, disturb=lambda model: None, prepare=prepare_ddp, reference=None, state=None):
    """Train as a run of its own would; return the folder of the ledger."""
    with deterministic(seed=5, threads=1):
        model = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
        model, optimizer, loader, backward = prepare(model)
        with Recorder(folder / name, model, optimizer, reference=reference) as run:
            if state is not None:
                run.load_state_dict(state)
            states.append(run.state_dict())
            for epoch in range(2):
                for images, classes in run.batches(loader):
                    loss = nn.functional.cross_entropy(model(images), classes)
                    optimizer.zero_grad()
                    backward(loss)
                    optimizer.step()
                    run.step(loss=loss)
                    disturb(model)
                run.epoch(epoch)
    return str(run.ledger)


def refuse(**words):
    """Return the type of the error that ends a training, and what it says first."""
    try:
        train("refused", **words)
    except D9mError as error:
        return [type(error).__name__, str(error)[:14]]


def one_ulp_on_rank_1(model):
    """Change one weight of rank 1 by one unit in the last place."""
    if RANK == 1:
        model.module[0].weight.data.view(torch.int32)[2, 3] += 1


if __name__ == "__main__":
    distributed.init_process_group("gloo")
    found = {"first": train("first"), "second": train("second")}
    try:
        train("drift", one_ulp_on_rank_1)
    except DriftError as error:
        found["drift"] = [error.rank, error.epoch, error.names]
    found["accelerated"] = [train("first", prepare=prepare_accelerate) for _ in range(2)]
    try:
        train("drift", one_ulp_on_rank_1, prepare_accelerate)
    except DriftError as error:
        found["accelerated drift"] = [error.rank, error.epoch, error.names]
    (folder / "file").write_text("")
    with contextlib.suppress(LedgerError):
        train("file/below")
    missing = folder / "missing"
    found["refused"] = [
        refuse(reference=[found["first"], missing][RANK]),  # rank 1 cannot read it
        refuse(state=states[0] | {"rank": 0}),
    ]
    found["ends"] = True
    (folder / f"found-{RANK}.json").write_text(json.dumps(found))
    distributed.destroy_process_group()
