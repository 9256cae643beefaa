"""One rank of loops with Fabric under its strategies; see loop/test_fabric_strategies.py.

``python fabric_training.py FOLDER CELL...`` runs each cell: the same training twice, the second
one with patched operations; with a fault on one rank; with probes twice; resumed from what the
first one has saved; and those of ``d9m locate``. Of the cells in ``LAUNCHED`` this is the process
that starts two ranks.
"""

import json
import os
import sys
import warnings
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
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
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor.parallel import parallelize_module
from trainings import make_loader

from lightning_d9m import Recorder, deterministic
from lightning_d9m.control import session

WORLD = int(os.environ.get("WORLD_SIZE", "1"))
LAUNCHED = ("ddp_spawn", "ddp_fork")
SAVED = 2  # steps, in the first epoch
# In these `d9m locate` finds the fault.
LOCATED = ("single device", "ddp", "ddp_spawn", "fsdp1", "fsdp1, flat parameters", "fsdp2", "tp")
LOCATED += ("pipeline", "hsdp", "fsdp2 and tp")
RACING = ("fsdp2",)  # in these an operation races, too
FULL = ("fsdp2", "tp", "hsdp", "fsdp2 and tp")  # these are resumed from full checkpoints, too
COPIED = "3.bias"  # each rank of tensor parallelism has it


class FSDPOnCPU(FSDPStrategy):
    """Fabric's FSDPStrategy on a CPU: torch needs the device as well."""

    def setup_module(self, module):
        return FullyShardedDataParallel(
            module,
            device_id=torch.device("cpu"),
            sharding_strategy=self.sharding_strategy,
            **self._fsdp_kwargs,
        )


class HookedDDP(DDPStrategy):
    """DDP that sends gradients as floats of 16 bits."""

    def setup_module(self, module):
        wrapped = super().setup_module(module)
        wrapped.register_comm_hook(None, fp16_compress_hook)
        return wrapped


def parallelize_tensors(model, mesh):
    """Divide the layers among the ranks, which train on the same batches."""
    return parallelize_module(model, mesh["tensor_parallel"], PLAN)


def leave_whole(model, mesh):
    """Return the model: each rank has made its own part of it."""
    return model


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


def fsdp1(**words):
    """Return a maker of FSDP1."""
    return lambda: FSDPOnCPU(state_dict_type="sharded", **words)


def fsdp1_hybrid():
    """Return FSDP1 that shards on two ranks, twice."""
    mesh = init_device_mesh("cpu", (2, WORLD // 2))
    return fsdp1(sharding_strategy="HYBRID_SHARD", device_mesh=mesh)()


CELLS = {
    "single device": lambda: "auto",
    "ddp": lambda: "ddp",
    "ddp, unused parameters": lambda: "ddp_find_unused_parameters_true",
    "ddp, fp16_compress_hook": HookedDDP,
    "ddp, static_graph": lambda: DDPStrategy(static_graph=True),
    "fsdp1": fsdp1(),
    "fsdp1, flat parameters": fsdp1(use_orig_params=False),
    "fsdp1, hybrid": fsdp1_hybrid,
    "fsdp2": model_parallel(shard),
    "tp": model_parallel(parallelize_tensors, data=1),
    "pipeline": model_parallel(leave_whole, data=1),
    "hsdp": model_parallel(shard_copies),
    "fsdp2 and tp": model_parallel(shard_tensors, data=WORLD // 2),
}


def launch(cell, *, full=False):
    """Launch the strategy of a cell; it saves full checkpoints or others."""
    strategy = CELLS[cell](full=True) if full else CELLS[cell]()
    fabric = Fabric(accelerator="cpu", devices=WORLD, strategy=strategy)
    fabric.launch()
    return fabric


def compute_whole(fabric, model, images, classes):
    """Compute the gradients; return the loss."""
    loss = nn.functional.cross_entropy(model(images), classes)
    fabric.backward(loss)
    return loss


def make_pipeline(model, rank):
    """Leave one stage of a model on each rank; return what computes the gradients of a batch."""
    ends = (0, 3, len(model))
    for number in set(range(len(model))) - set(range(*ends[rank : rank + 2])):
        del model._modules[str(number)]
    stage = PipelineStage(model, rank, WORLD, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 2, loss_fn=nn.functional.cross_entropy)

    def compute(_, __, images, classes):
        losses = []
        if rank == 0:
            schedule.step(images)
            return None
        schedule.step(target=classes, losses=losses)
        return torch.stack(losses).mean()

    return compute


def save_stage(path, parts):
    """Save the stage of this rank."""
    states = {name: part.state_dict() for name, part in parts.items()}
    torch.save(states, f"{path}-{dist.get_rank()}")


def load_stage(path, parts):
    """Load what ``save_stage`` has saved."""
    for name, state in torch.load(f"{path}-{dist.get_rank()}", weights_only=True).items():
        parts[name].load_state_dict(state)


def train(  # noqa: PLR0913 - one keyword for each kind of run
    folder,
    cell,
    name,
    *,
    fault=None,
    saves=False,
    resume=False,
    full=False,
    patched=False,
    epochs=2,
    launched=None,
    **words,
):
    """Train as a run of its own would, and save at a step if it ``saves``."""
    session._fits = 0
    fabric = launched or launch(cell, full=full)
    rank = fabric.global_rank
    checkpoint, own = folder / f"checkpoint-{full}", folder / f"run-{rank}.pt"
    faulty = fault is not None and fault.rank == rank
    with deterministic(seed=5, threads=1), patches_counted(folder / name, rank, on=patched):
        activation = RacingReLU() if faulty and fault.races else nn.ReLU()
        layers = (nn.Linear(64, 32), activation, nn.Dropout(0.3), nn.Linear(32, 10))
        # The gradient of this padding is one of the patched operations.
        model = nn.Sequential(*layers, nn.ReflectionPad1d(1))
        save, load, compute = fabric.save, fabric.load, compute_whole
        if cell == "pipeline":
            save, load, compute = save_stage, load_stage, make_pipeline(model, rank)
        model = fabric.setup_module(model)
        adam = torch.optim.Adam(model.parameters(), lr=0.01, foreach=False)
        optimizer = fabric.setup_optimizers(adam)
        loader = fabric.setup_dataloaders(make_loader())
        parts = {"model": model, "optimizer": optimizer}
        with Recorder(folder / name, model, optimizer, **words) as run:
            if resume:
                load(checkpoint, parts)
                run.load_state_dict(torch.load(own, weights_only=True))
            for epoch in range(run.next_epoch, epochs):
                for batch, (images, classes) in enumerate(run.batches(loader)):
                    optimizer.zero_grad()
                    loss = compute(fabric, model, images, classes)
                    optimizer.step()
                    run.step(loss=loss)
                    if saves and run.global_step == SAVED:
                        save(checkpoint, parts)
                        torch.save(run.state_dict(), own)
                    if faulty and (fault.epoch, fault.batch) == (epoch, batch):
                        change_one_bit(model, fault.name)
                if faulty and (fault.epoch, fault.batch) == (epoch, None) and not fault.races:
                    change_one_bit(model, fault.name)
                run.epoch(epoch)


def run(folder, cell, launched=None):
    """Run a cell; write the facts of the error of each training, None without one.

    Args:
        folder: The folder of the cell.
        cell: The cell.
        launched: The Fabric that has started this process; None if each training makes one.
    """
    once = partial(train, folder, cell, launched=launched)
    once("first", saves=True)
    ranks = WORLD if launched is None else launched.world_size
    rank = dist.get_rank() if ranks > 1 else 0
    reference = folder / "first" / "fit-000"
    fault = Fault(ranks - 1)
    trainings = {
        "second": {"reference": reference, "patched": True},
        "probed": {"probes": "all"},
        "probed again": {"probes": "all"},
        "fault": {"reference": reference, "fault": fault},
        "fault without reference": {"fault": fault},
        "resumed": {"resume": True, "reference": reference},
    }
    if "tp" in cell:
        trainings["fault of a copy"] = {"fault": fault._replace(name=COPIED)}
    if cell in FULL:
        trainings["saved full"] = {"saves": True, "full": True}
        trainings["resumed from full"] = {"resume": True, "full": True, "reference": reference}
    found = {}
    for name, words in trainings.items():
        try:
            once(name, **words)
        except Exception as error:  # noqa: BLE001 - the tests read what it says
            found[name] = describe(error)
        else:
            found[name] = None

    def locate_fault(name, fault):
        def train_once(number):
            present = fault if fault.races or number % 2 == 0 else None
            once("located", fault=present, epochs=1)

        found[name] = locate(train_once, folder / f"{name} runs", rank=rank, ranks=ranks)

    if cell in LOCATED:
        locate_fault("located", fault._replace(epoch=0, batch=0))
    if cell in RACING:
        locate_fault("located op", fault._replace(races=True))
    (folder / f"found-{rank}.json").write_text(json.dumps(found))


def run_launched(fabric, folder, cell):
    """Run a cell in a process that Fabric has started."""
    warnings.filterwarnings("ignore")
    run(folder, cell, fabric)


def main():
    """Run cells, one after the other."""
    warnings.filterwarnings("ignore")
    for cell in sys.argv[2:]:
        folder = Path(sys.argv[1]) / cell
        folder.mkdir(exist_ok=True)
        if cell in LAUNCHED:
            Fabric(accelerator="cpu", devices=2, strategy=cell).launch(run_launched, folder, cell)
        else:
            run(folder, cell)


if __name__ == "__main__":
    main()
