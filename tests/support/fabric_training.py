"""One rank of loops with Fabric under its strategies; see loop/test_fabric_strategies.py.

``python fabric_training.py FOLDER CELL...`` runs each cell: the same training twice, with a fault
on one rank, with probes twice, with patched operations, stopped within an epoch and resumed, and
those of ``d9m locate``.
"""

import json
import os
import sys
import warnings
from pathlib import Path

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import FSDPStrategy, ModelParallelStrategy
from located_runs import locate
from strategy_training import (
    PLAN,
    Fault,
    RacingReLU,
    change_one_bit,
    describe,
    patches_counted,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import parallelize_module
from trainings import make_loader

from lightning_d9m import Recorder, deterministic
from lightning_d9m.control import session

RANK = int(os.environ["RANK"])
WORLD = int(os.environ["WORLD_SIZE"])
STOP = 2  # steps, in the first epoch
RACING = ("fsdp2",)  # in these an operation races, too
FULL = ("fsdp2", "tp", "hsdp", "fsdp2 and tp")  # these are resumed from full checkpoints, too
COPIED = "3.bias"  # each rank of tensor parallelism has it


class FSDPOnCPU(FSDPStrategy):
    """Fabric's FSDPStrategy on a CPU: torch needs the device as well."""

    def setup_module(self, module):
        return FullyShardedDataParallel(module, device_id=torch.device("cpu"), **self._fsdp_kwargs)


def parallelize_tensors(model, mesh):
    """Divide the layers among the ranks, which train on the same batches."""
    return parallelize_module(model, mesh["tensor_parallel"], PLAN)


def shard(model, mesh):
    """Divide the parameters among the ranks."""
    return shard_on(model, mesh["data_parallel"])


def shard_copies(model, mesh):
    """Divide the parameters among two ranks, twice."""
    sizes, names = (2, WORLD // 2), ("copies", "shards")
    return shard_on(model, init_device_mesh("cpu", sizes, mesh_dim_names=names))


def shard_tensors(model, mesh):
    """Divide the layers among two ranks, and each part among two others."""
    return shard(parallelize_tensors(model, mesh), mesh)


def shard_on(model, mesh):
    """Divide the parameters among the ranks of a mesh."""
    for module in (model[0], model[3], model):
        fully_shard(module, mesh=mesh)
    return model


def model_parallel(divide, *, data=WORLD):
    """Return a maker of a strategy that divides parameters as DTensors."""
    return lambda full=False: ModelParallelStrategy(
        divide,
        data_parallel_size=data,
        tensor_parallel_size=WORLD // data,
        save_distributed_checkpoint=not full,
    )


CELLS = {
    "single device": lambda: "auto",
    "ddp": lambda: "ddp",
    "fsdp1": lambda: FSDPOnCPU(state_dict_type="sharded"),
    "fsdp2": model_parallel(shard),
    "tp": model_parallel(parallelize_tensors, data=1),
    "hsdp": model_parallel(shard_copies),
    "fsdp2 and tp": model_parallel(shard_tensors, data=WORLD // 2),
}


def make_strategy(cell, full):
    """Return the strategy of a cell; it saves full checkpoints or others."""
    return CELLS[cell](full=True) if full else CELLS[cell]()


def train(  # noqa: PLR0913 - one keyword for each kind of run
    folder,
    cell,
    name,
    *,
    fault=None,
    stop=None,
    resume=False,
    full=False,
    patched=False,
    epochs=2,
    **words,
):
    """Train as a run of its own would; save at a step and stop."""
    session._fits = 0
    fabric = Fabric(accelerator="cpu", devices=WORLD, strategy=make_strategy(cell, full))
    fabric.launch()
    checkpoint, own = folder / f"checkpoint-{full}", folder / f"run-{RANK}.pt"
    faulty = fault is not None and fault.rank == RANK
    with deterministic(seed=5, threads=1), patches_counted(folder / name, RANK, on=patched):
        activation = RacingReLU() if faulty and fault.races else nn.ReLU()
        layers = (nn.Linear(64, 32), activation, nn.Dropout(0.3), nn.Linear(32, 10))
        model = fabric.setup_module(nn.Sequential(*layers))
        adam = torch.optim.Adam(model.parameters(), lr=0.01, foreach=False)
        optimizer = fabric.setup_optimizers(adam)
        loader = fabric.setup_dataloaders(make_loader())
        parts = {"model": model, "optimizer": optimizer}
        with Recorder(folder / name, model, optimizer, **words) as run:
            if resume:
                fabric.load(checkpoint, parts)
                run.load_state_dict(torch.load(own, weights_only=True))
            for epoch in range(run.next_epoch, epochs):
                for batch, (images, classes) in enumerate(run.batches(loader)):
                    optimizer.zero_grad()
                    # The gradient of this padding is one of the patched operations.
                    scores = nn.functional.pad(model(images), (1, 1), mode="reflect")
                    loss = nn.functional.cross_entropy(scores, classes)
                    fabric.backward(loss)
                    optimizer.step()
                    run.step(loss=loss)
                    if run.global_step == stop:
                        fabric.save(checkpoint, parts)
                        torch.save(run.state_dict(), own)
                        return
                    if faulty and (fault.epoch, fault.batch) == (epoch, batch):
                        change_one_bit(model, fault.name)
                if faulty and (fault.epoch, fault.batch) == (epoch, None) and not fault.races:
                    change_one_bit(model, fault.name)
                run.epoch(epoch)


def locate_fault(folder, cell, fault):
    """Locate a fault that one rank has in each second run; return what rank 0 printed."""

    def train_once(number):
        present = fault if fault.races or number % 2 == 0 else None
        train(folder, cell, "located", fault=present, epochs=1)

    name = "located op" if fault.races else "located"
    return locate(train_once, folder / f"{name} runs", rank=RANK, ranks=WORLD)


def run(folder, cell):
    """Run a cell; return the facts of the error of each training, None without one."""
    train(folder, cell, "first")
    reference = folder / "first" / "fit-000"
    fault = Fault(WORLD - 1)
    trainings = {
        "second": {"reference": reference},
        "fault": {"reference": reference, "fault": fault},
        "fault without reference": {"fault": fault},
        "fault of a copy": {"fault": fault._replace(name=COPIED)},
        "probed": {"probes": "all"},
        "probed again": {"probes": "all"},
        "patched": {"patched": True, "reference": reference},
        "stopped": {"stop": STOP},
        "resumed": {"resume": True, "reference": reference},
        "stopped with full": {"stop": STOP, "full": True},
        "resumed from full": {"resume": True, "full": True, "reference": reference},
    }
    if cell not in FULL:
        del trainings["stopped with full"], trainings["resumed from full"]
    if "tp" not in cell:
        del trainings["fault of a copy"]
    found = {}
    for name, words in trainings.items():
        try:
            train(folder, cell, name, **words)
        except Exception as error:  # noqa: BLE001 - the tests read what it says
            found[name] = describe(error)
        else:
            found[name] = None
    found["located"] = locate_fault(folder, cell, Fault(WORLD - 1, epoch=0, batch=0))
    if cell in RACING:
        found["located op"] = locate_fault(folder, cell, Fault(WORLD - 1, races=True))
    return found


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    for cell in sys.argv[2:]:
        folder = Path(sys.argv[1]) / cell
        folder.mkdir(exist_ok=True)
        (folder / f"found-{RANK}.json").write_text(json.dumps(run(folder, cell)))
