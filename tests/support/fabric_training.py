"""One rank of loops with Fabric under its strategies; see loop/test_fabric_strategies.py.

``python fabric_training.py FOLDER CELL...`` runs each cell: the same training twice, with a fault
on one rank, with probes twice, stopped within an epoch and resumed.
"""

import json
import os
import sys
import warnings
from pathlib import Path

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import FSDPStrategy, ModelParallelStrategy
from strategy_training import PLAN, describe
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import parallelize_module
from trainings import make_loader

from lightning_d9m import Recorder, deterministic
from lightning_d9m.control import session

RANK = int(os.environ["RANK"])
WORLD = int(os.environ["WORLD_SIZE"])
STOP = 2  # steps, in the first epoch


class FSDPOnCPU(FSDPStrategy):
    """Fabric's FSDPStrategy on a CPU: torch needs the device as well."""

    def setup_module(self, module):
        return FullyShardedDataParallel(module, device_id=torch.device("cpu"), **self._fsdp_kwargs)


def parallelize_tensors(model, mesh):
    """Divide the layers among the ranks, which train on the same batches."""
    return parallelize_module(model, mesh["tensor_parallel"], PLAN)


def shard(model, mesh):
    """Divide the parameters among the ranks."""
    for module in (model[0], model[3], model):
        fully_shard(module, mesh=mesh["data_parallel"])
    return model


def model_parallel(divide, *, data, full=False):
    """Return a maker of a strategy that divides parameters as DTensors."""
    return lambda: ModelParallelStrategy(
        divide,
        data_parallel_size=data,
        tensor_parallel_size=WORLD // data,
        save_distributed_checkpoint=not full,
    )


CELLS = {
    "single device": lambda: "auto",
    "ddp": lambda: "ddp",
    "fsdp1": lambda: FSDPOnCPU(state_dict_type="sharded"),
    "fsdp2": model_parallel(shard, data=WORLD),
    "fsdp2, full checkpoints": model_parallel(shard, data=WORLD, full=True),
    "tp": model_parallel(parallelize_tensors, data=1),
    "tp, full checkpoints": model_parallel(parallelize_tensors, data=1, full=True),
}


def train(folder, cell, name, *, faulty=None, stop=None, resume=False, **words):
    """Train as a run of its own would, and return the recorder; save at a step and stop."""
    session._fits = 0
    fabric = Fabric(accelerator="cpu", devices=WORLD, strategy=CELLS[cell]())
    fabric.launch()
    checkpoint, own = folder / "checkpoint", folder / f"run-{RANK}.pt"
    with deterministic(seed=5, threads=1):
        layers = (nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 10))
        model = fabric.setup_module(nn.Sequential(*layers))
        adam = torch.optim.Adam(model.parameters(), lr=0.01, foreach=False)
        optimizer = fabric.setup_optimizers(adam)
        loader = fabric.setup_dataloaders(make_loader())
        parts = {"model": model, "optimizer": optimizer}
        with Recorder(folder / name, model, optimizer, **words) as run:
            if resume:
                fabric.load(checkpoint, parts)
                run.load_state_dict(torch.load(own, weights_only=True))
            for epoch in range(run.next_epoch, 2):
                for images, classes in run.batches(loader):
                    optimizer.zero_grad()
                    loss = nn.functional.cross_entropy(model(images), classes)
                    fabric.backward(loss)
                    optimizer.step()
                    run.step(loss=loss)
                    if run.global_step == stop:
                        fabric.save(checkpoint, parts)
                        torch.save(run.state_dict(), own)
                        return run
                if (faulty, epoch) == (RANK, 1):
                    change(model)
                run.epoch(epoch)
    return run


def change(model):
    """Change one weight by one unit in the last place."""
    weight = next(model.parameters()).detach()
    weight = weight.to_local() if hasattr(weight, "to_local") else weight
    weight.view(-1)[:1].view(torch.int32)[0] += 1


def run(folder, cell):
    """Run a cell; return the facts of the error of each training, None without one."""
    train(folder, cell, "first")
    reference = folder / "first" / "fit-000"
    trainings = {
        "second": {"reference": reference},
        "fault": {"reference": reference, "faulty": WORLD - 1},
        "fault without reference": {"faulty": WORLD - 1},
        "probed": {"probes": "all"},
        "probed again": {"probes": "all"},
        "stopped": {"stop": STOP},
        "resumed": {"resume": True, "reference": reference},
    }
    found = {}
    for name, words in trainings.items():
        try:
            train(folder, cell, name, **words)
        except Exception as error:  # noqa: BLE001 - the tests read what it says
            found[name] = describe(error)
        else:
            found[name] = None
    return found


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    for cell in sys.argv[2:]:
        folder = Path(sys.argv[1]) / cell
        folder.mkdir(exist_ok=True)
        (folder / f"found-{RANK}.json").write_text(json.dumps(run(folder, cell)))
