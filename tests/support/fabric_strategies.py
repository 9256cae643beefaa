"""Loops with Fabric under its strategies: the cells of strategy_cells.py that have its name."""

import os
from collections import OrderedDict

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from strategy_cells import FABRIC, PIPELINE
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor.parallel import parallelize_module
from trainer_strategies import (
    PLAN,
    SHORT,
    RacingReLU,
    change_one_bit,
    make_optimizer,
    patches_counted,
)
from trainings import make_loader

from lightning_d9m import Recorder, deterministic

WORLD = int(os.environ.get("WORLD_SIZE", "1"))


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
    parallelize_module(model.layers, mesh["tensor_parallel"], PLAN)
    return model


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
    for module in (model.layers[0], model.layers[3], model):
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


def compute_whole(fabric, model, images, classes):
    """Compute the gradients; return the loss."""
    loss = nn.functional.cross_entropy(model(images), classes)
    fabric.backward(loss)
    return loss


def make_pipeline(model, rank):
    """Leave one stage of a model on each rank; return what computes the gradients of a batch."""
    for name in ("012", "3")[1 - rank]:
        del model.layers._modules[name]
    if rank == 0:
        del model._modules["pad"]
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


def fit(  # noqa: PLR0913 - as that of a Trainer
    folder, cell, name, *, fault=None, resume_from=None, saves=False, full=False, patched=False,
    limits=SHORT, launched=None, **words,
):  # fmt: skip
    """Train; save after the first step if it ``saves``, and resume if there is a place to do it."""
    strategy = CELLS[cell.removeprefix(FABRIC)] if launched is None else None
    fabric = launched or Fabric(
        accelerator="cpu", devices=WORLD, strategy=strategy(full=True) if full else strategy()
    )
    if launched is None:
        fabric.launch()
    rank = fabric.global_rank
    checkpoint, own = folder / f"checkpoint-{full}", folder / f"run-{rank}.pt"
    faulty = fault is not None and fault.rank == rank
    with deterministic(seed=5, threads=1), patches_counted(folder / name, rank, on=patched):
        activation = RacingReLU() if faulty and fault.races else nn.ReLU()
        layers = nn.Sequential(nn.Linear(64, 32), activation, nn.Dropout(0.3), nn.Linear(32, 10))
        # The gradient of this padding is one of the patched operations.
        model = nn.Sequential(OrderedDict(layers=layers, pad=nn.ReflectionPad1d(1)))
        save, load, compute = fabric.save, fabric.load, compute_whole
        if cell == PIPELINE:
            save, load, compute = save_stage, load_stage, make_pipeline(model, rank)
        model = fabric.setup_module(model)
        optimizer = fabric.setup_optimizers(make_optimizer(model.parameters()))
        loader = fabric.setup_dataloaders(make_loader())
        parts = {"model": model, "optimizer": optimizer}
        with Recorder(folder / name, model, optimizer, **words) as run:
            if resume_from:
                load(checkpoint, parts)
                run.load_state_dict(torch.load(own, weights_only=True))
            for epoch in range(run.next_epoch, limits["max_epochs"]):
                last = limits["limit_train_batches"] - 1
                first = run.global_step % (last + 1)
                numbers = range(first, last + 1)
                for batch, (images, classes) in zip(numbers, run.batches(loader), strict=False):
                    optimizer.zero_grad()
                    loss = compute(fabric, model, images, classes)
                    optimizer.step()
                    run.step(loss=loss)
                    if saves and run.global_step == 1:
                        save(checkpoint, parts)
                        torch.save(run.state_dict(), own)
                    at = last if fault is None or fault.batch is None else fault.batch
                    if faulty and not fault.races and (fault.epoch, at) == (epoch, batch):
                        change_one_bit(model, fault.name)
                run.epoch(epoch)
