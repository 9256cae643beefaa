"""Trainings under strategies and precisions: the cells of strategy_cells.py.

``python strategies.py FOLDER CELL...`` is one rank that runs each cell: the same training twice,
with probes, the second one with patched operations; resumed from a checkpoint of the first one,
with a fault on one rank; and those of ``d9m locate``. Of the cells in ``LAUNCHED`` it is the
process that starts two ranks for each training, of those of Fabric for all.
"""

import json
import os
import sys
import warnings
from collections import OrderedDict
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import lightning as L
import numpy as np
import strategy_cells as cells
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric import strategies as of_fabric
from lightning.pytorch import strategies as of_trainers
from located_runs import locate
from rank_processes import RANK
from torch import nn
from torch.distributed import fsdp
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint
from trainings import QUIET, make_loader

from lightning_d9m import (
    DDPDeterministicStrategy,
    DeterminismCallback,
    HorovodDeterministicStrategy,
    Recorder,
    deterministic,
)
from lightning_d9m.engine.control import session
from lightning_d9m.engine.hashing.training_state import plain_name
from lightning_d9m.errors import D9mError
from lightning_d9m.ops.patches import registration

WORLD = int(os.environ.get("HOROVOD_SIZE") or os.environ.get("WORLD_SIZE", "1"))
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
PLAN = {"0": ColwiseParallel(), "3": RowwiseParallel()}
COPIED = "layers.3.bias"  # each rank of tensor parallelism has it
LAST_STEP = 4
VARIABLES = ("CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO")
SHORTEST = {"max_epochs": 1, "limit_train_batches": 2, "limit_val_batches": 0}
SHORT = SHORTEST | {"max_epochs": 2, "limit_val_batches": 1, "num_sanity_val_steps": 0}


def apply_plainly(layers, images):
    return layers(images)


def apply_checkpointed(layers, images, *, reentrant=False):
    """Return the scores; the backward pass computes the first three layers again."""
    hidden = checkpoint(layers[:3], images.requires_grad_(reentrant), use_reentrant=reentrant)
    return layers[3](hidden)


def apply_vmapped(layers, images):
    """Return the scores of each image by itself, with its own dropout."""
    parameters = dict(layers.named_parameters())

    def score(image):
        return torch.func.functional_call(layers, parameters, (image,))

    return torch.func.vmap(score, randomness="different")(images)


class Float8Product(torch.autograd.Function):
    """A product of matrices of which each is rounded to 8 bits."""

    @staticmethod
    def forward(ctx, images, weight):
        rounded = [value.to(torch.float8_e4m3fn) for value in (images, weight)]
        ctx.save_for_backward(rounded[0])
        one = torch.ones(())
        return torch._scaled_mm(
            rounded[0], rounded[1].t(), scale_a=one, scale_b=one, out_dtype=torch.float32
        )

    @staticmethod
    def backward(ctx, gradient):
        (images,) = ctx.saved_tensors
        return None, gradient.to(torch.float8_e5m2).float().t() @ images.float()


def apply_float8(layers, images):
    """Return the scores; the first layer multiplies floats of 8 bits."""
    return layers[1:](Float8Product.apply(images, layers[0].weight) + layers[0].bias)


class Fault(NamedTuple):
    """A fault on one rank.

    Attributes:
        rank: The rank.
        epoch: Its epoch.
        batch: The batch after whose step a weight changes; the last one of the epoch if None.
        name: The weight; the first one if empty.
        races: Whether an operation is not deterministic instead.
    """

    rank: int
    epoch: int = 1
    batch: int | None = None
    name: str = ""
    races: bool = False

    def change_weight(self, rank, model, epoch, batch, last):
        """Flip one bit of one weight at its step: not the last, which a step may round away."""
        at = last if self.batch is None else self.batch
        if self.races or (self.rank, self.epoch, at) != (rank, epoch, batch):
            return
        weights = {plain_name(own): weight for own, weight in model.named_parameters()}
        weight = next(own for key, own in weights.items() if key.endswith(self.name)).detach()
        weight = weight.to_local() if hasattr(weight, "to_local") else weight
        weight.view(-1)[:1].view(INTEGERS[weight.element_size()])[0] ^= 64


NO_FAULT = Fault(-1)


@torch.library.custom_op("d9m_strategies::race", mutates_args=())
def race(values: torch.Tensor) -> torch.Tensor:
    """Return values whose last bits differ from call to call, as those of racing threads do."""
    return values * (1 + int(np.random.default_rng().integers(2**16)) * 2.0**-23)


race.register_autograd(lambda ctx, gradient: gradient)


class RacingReLU(nn.ReLU):
    def forward(self, values):
        return race(super().forward(values))


def make_layers(*, races=False):
    activation = RacingReLU() if races else nn.ReLU()
    return nn.Sequential(nn.Linear(64, 32), activation, nn.Dropout(0.3), nn.Linear(32, 10))


def make_optimizer(parameters):
    """Return Adam with an epsilon that is not 0 in half precision, in which weights stay finite."""
    return torch.optim.Adam(parameters, lr=0.01, eps=1e-4)


def divide(layout, model, mesh):
    """Divide the parameters of a model among the ranks as ``layout`` says; return it."""
    if "tp" in layout:  # the ranks train on the same batches
        parallelize_module(model.layers, mesh["tensor_parallel"], PLAN)
    if "hsdp" in layout:
        mesh = init_device_mesh("cpu", (2, WORLD // 2), mesh_dim_names=("copies", "shards"))
    elif "fsdp" in layout:
        mesh = mesh["data_parallel"]
    else:
        return model
    # Pinned memory, the default, needs an accelerator.
    policy = CPUOffloadPolicy(pin_memory=False) if "offload" in layout else OffloadPolicy()
    for module in (model.layers[0], model.layers[3], model):
        fully_shard(module, mesh=mesh, offload_policy=policy)
    return model


class Net(L.LightningModule):
    """A small classifier that is divided as ``layout`` says."""

    def __init__(self, layout="", fault=NO_FAULT, apply=apply_plainly):
        super().__init__()
        self.layers = make_layers()
        self.layout = layout
        self.fault = fault
        self.apply_layers = apply

    def configure_model(self):
        divide(self.layout, self, self.layout and self.device_mesh)

    def training_step(self, batch, _):
        images, classes = batch
        scores = self.apply_layers(self.layers, images)
        # The gradient of this padding is one of the patched operations.
        padded = nn.functional.pad(scores, (1, 1), mode="reflect")
        loss = nn.functional.cross_entropy(padded, classes)
        self.log("train_loss", loss)
        return loss

    @torch.compiler.disable  # torch 2.13 cannot compile Lightning 2.6.6's method
    def log(self, *args, **words):
        super().log(*args, **words)

    def validation_step(self, batch, _):
        images, classes = batch
        self.log("val_loss", nn.functional.cross_entropy(self.layers(images), classes))

    def on_fit_start(self):
        if self.fault.races and self.fault.rank == self.global_rank:
            self.layers[1] = RacingReLU()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        last = self.trainer.num_training_batches - 1
        place = (self.current_epoch, batch_idx, last)
        self.fault.change_weight(self.global_rank, self.trainer.model, *place)

    def configure_optimizers(self):
        optimizer = make_optimizer(self.parameters())
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]


def compile_layers(model):
    """Compile a submodule; `aot_eager` does all that Inductor does before it makes kernels."""
    model.layers = torch.compile(model.layers, backend="aot_eager")
    return model


def compile_module(model):
    return torch.compile(model, backend="aot_eager")


@dataclass(frozen=True)
class Cell:
    """A training: its strategy, the layout of its model, what that applies, how it is compiled.

    The strategy is a name, or makes one of a package's classes, with full checkpoints or without.
    """

    strategy: Any
    layout: str = ""
    apply: Any = apply_plainly
    compile: Any = lambda model: model
    words: dict[str, Any] = field(default_factory=dict)
    devices: int = WORLD

    def make_strategy(self, package, *, full):
        """Return the strategy that a Trainer or Fabric takes."""
        return self.strategy if isinstance(self.strategy, str) else self.strategy(package, full)


def model_parallel(layout, **words):
    """Return a training whose strategy divides parameters as DTensors."""
    data = {"tp": 1, "pipeline": 1, "fsdp, tp": WORLD // 2}.get(layout, WORLD)

    def make(package, full):
        return package.ModelParallelStrategy(
            *([partial(divide, layout)] if package is of_fabric else []),
            data_parallel_size=data,
            tensor_parallel_size=WORLD // data,
            save_distributed_checkpoint=not full,
        )

    return Cell(make, layout, words=words)


def keep_in_place(kind, offload_to_cpu, rank0_only):
    """Return how torch gathers a full checkpoint, without moving it: it crashes on a CPU."""
    return kind(offload_to_cpu=False, rank0_only=rank0_only)


fsdp.FullStateDictConfig = partial(keep_in_place, FullStateDictConfig)
fsdp.api.FullOptimStateDictConfig = partial(keep_in_place, FullOptimStateDictConfig)


def wrap_on_cpu(strategy, module):
    """Wrap a module as Lightning does; torch needs the device as well."""
    return FullyShardedDataParallel(
        module,
        device_id=torch.device("cpu"),
        sharding_strategy=strategy.sharding_strategy,
        mixed_precision=strategy.mixed_precision_config,
        **(strategy.kwargs if hasattr(strategy, "kwargs") else strategy._fsdp_kwargs),
    )


def fsdp1(**words):
    """Return a training with FSDP1, whose strategy Lightning refuses on a CPU."""

    def make(package, full):
        methods = {"setup_module": wrap_on_cpu, "_setup_model": wrap_on_cpu}
        kind = type("FSDPOnCPU", (package.FSDPStrategy,), methods)
        found = {name: value() if callable(value) else value for name, value in words.items()}
        return kind(state_dict_type="full" if full else "sharded", **found)

    return Cell(make)


class HookedDDP(of_fabric.DDPStrategy):
    """DDP of Fabric that sends gradients as floats of 16 bits."""

    def setup_module(self, module):
        wrapped = super().setup_module(module)
        wrapped.register_comm_hook(None, fp16_compress_hook)
        return wrapped


def make_hooked(package, _):
    if package is of_fabric:
        return HookedDDP()
    return package.DDPStrategy(ddp_comm_hook=fp16_compress_hook)


def on_one(precision="32-true", **words):
    return Cell("auto", words={"precision": precision}, **words)


CELLS = {
    "single device": on_one(),
    "single device, bf16-mixed": on_one("bf16-mixed"),
    "single device, bf16-true": on_one("bf16-true"),
    "single device, 16-true": on_one("16-true"),
    "single device, 64-true": on_one("64-true"),
    "single device, checkpointing": on_one(apply=apply_checkpointed),
    "single device, reentrant checkpointing": on_one(
        apply=partial(apply_checkpointed, reentrant=True)
    ),
    "single device, torch.func": on_one(apply=apply_vmapped),
    "single device, float8": on_one(apply=apply_float8),
    "single device, compiled layers": on_one(compile=compile_layers),
    "single device, compiled module": on_one(compile=compile_module),
    "ddp": Cell("ddp"),
    "ddp, bf16-mixed": Cell("ddp", words={"precision": "bf16-mixed"}),
    "ddp, unused parameters": Cell("ddp_find_unused_parameters_true"),
    "ddp, fp16_compress_hook": Cell(make_hooked),
    "ddp, static_graph": Cell(lambda package, _: package.DDPStrategy(static_graph=True)),
    "ddp_d9m, logical ranks": Cell(lambda *_: DDPDeterministicStrategy(logical_ranks=4)),
    "ddp_spawn": Cell("ddp_spawn", devices=2),
    "ddp_fork": Cell("ddp_fork", devices=2),
    "fsdp1": fsdp1(),
    "fsdp1, wrapped layers": fsdp1(auto_wrap_policy={nn.Linear}),
    "fsdp1, flat parameters": fsdp1(use_orig_params=False),
    "fsdp1, hybrid": fsdp1(
        sharding_strategy="HYBRID_SHARD",
        device_mesh=lambda: init_device_mesh("cpu", (2, WORLD // 2)),
    ),
    "fsdp2": model_parallel("fsdp"),
    "fsdp2, bf16-true": model_parallel("fsdp", precision="bf16-true"),
    "fsdp2, CPU offload": model_parallel("fsdp, offload"),
    "hsdp": model_parallel("hsdp"),
    "tp": model_parallel("tp"),
    "fsdp2 and tp": model_parallel("fsdp, tp"),
    "pipeline": model_parallel("pipeline"),  # each rank makes its own part of the model
    # horovodrun starts a process for each rank, in which Lightning has one device.
    "horovod_d9m": Cell("horovod_d9m", devices=1),
    "horovod_d9m, logical ranks": Cell(
        lambda *_: HorovodDeterministicStrategy(logical_ranks=4), devices=1
    ),
}


class ErrorKeepingCallback(DeterminismCallback):
    """Keeps the facts of an error of each rank, which the launcher's process does not get."""

    def on_exception(self, trainer, pl_module, exception):
        """Write them before the launcher ends the other rank."""
        super().on_exception(trainer, pl_module, exception)
        if isinstance(exception, D9mError):
            folder = Path(self._recorder._make_folder.keywords["ledger_dir"])
            folder.mkdir(exist_ok=True)
            (folder / f"error-{trainer.global_rank}").write_text(json.dumps(describe(exception)))
            trainer.strategy.barrier()


@contextmanager
def patches_counted(folder, rank):
    """Patch the operations of a CPU, and write how often one was called; no folder: neither."""
    if folder is None:
        yield
        return
    calls = []
    call = registration.Kernel.__call__

    def count(kernel, *args, **kwargs):
        if "padding" in repr(kernel._replacement):  # which call others, too
            calls.append(kernel)
        return call(kernel, *args, **kwargs)

    counted = mock.patch.object(registration.Kernel, "__call__", count)
    with counted, registration.patches_applied("CPU"):
        yield
    (folder / f"calls-{rank}").write_text(str(len(calls)))


class Patching(L.Callback):
    def __init__(self, folder):
        self.folder = folder

    def setup(self, trainer, pl_module, stage):
        self.stack = ExitStack()
        self.stack.enter_context(patches_counted(self.folder, trainer.global_rank))

    def teardown(self, trainer, pl_module, stage):
        self.stack.close()


class Saving(L.Callback):
    def __init__(self, folder, steps):
        self.folder, self.steps = folder, steps

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step in self.steps:
            trainer.save_checkpoint(self.folder / f"step={trainer.global_step}.ckpt")


def fit(  # noqa: PLR0913 - one keyword for each kind of run
    folder, cell, name, *, fault=NO_FAULT, resume_from=None, saves=(), full=False,
    patched=False, limits=SHORT, **words,
):  # fmt: skip
    """Train with a Trainer that saves after some steps; return the callback."""
    callback = ErrorKeepingCallback(**({"seed": 5, "ledger_dir": folder / name} | words))
    callbacks = [callback, *([Patching(folder / name)] if patched else [])]
    if saves:
        callbacks.append(Saving(folder / ("full checkpoints" if full else "checkpoints"), saves))
    kind = CELLS[cell.removesuffix(", 4 ranks")]
    torch.manual_seed(7)
    model = kind.compile(Net(kind.layout, fault, kind.apply))
    if cell in cells.FLAT_ONES:
        model.configure_optimizers = lambda: make_optimizer(model.trainer.model.parameters())
    trainer = L.Trainer(
        strategy=kind.make_strategy(of_trainers, full=full),
        devices=kind.devices,
        callbacks=callbacks,
        **limits,
        **QUIET,
        **kind.words,
    )
    trainer.fit(model, make_loader(), make_loader(shuffle=False), ckpt_path=resume_from)
    return callback


def compute_whole(fabric, model, images, classes):
    loss = nn.functional.cross_entropy(model(images), classes)
    fabric.backward(loss)
    return loss


def make_pipeline(model, rank):
    """Leave one stage of a model on each rank; return what computes the gradients of a batch."""
    # A recorder looks for stages among all objects of a process that has imported this.
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

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
    states = {name: part.state_dict() for name, part in parts.items()}
    torch.save(states, f"{path}-{dist.get_rank()}")


def load_stage(path, parts):
    for name, state in torch.load(f"{path}-{dist.get_rank()}", weights_only=True).items():
        parts[name].load_state_dict(state)


def fit_with_fabric(  # noqa: PLR0913 - as that of a Trainer
    folder, cell, name, *, fault=NO_FAULT, resume_from=None, saves=(), full=False,
    patched=False, limits=SHORT, launched=None, **words,
):  # fmt: skip
    """Train; save after the first step if it ``saves``, and resume if there is a place to do it."""
    fabric = launched
    if fabric is None:
        strategy = CELLS[cell.removeprefix(cells.FABRIC)].make_strategy(of_fabric, full=full)
        fabric = Fabric(accelerator="cpu", devices=WORLD, strategy=strategy)
        fabric.launch()
    rank = fabric.global_rank
    checkpoint, own = folder / f"checkpoint-{full}", folder / f"run-{rank}.pt"
    counted = patches_counted(folder / name if patched else None, rank)
    with deterministic(seed=5, threads=1), counted:
        layers = make_layers(races=fault.races and fault.rank == rank)
        # The gradient of this padding is one of the patched operations.
        model = nn.Sequential(OrderedDict(layers=layers, pad=nn.ReflectionPad1d(1)))
        save, load, compute = fabric.save, fabric.load, compute_whole
        if cell == cells.PIPELINE:
            save, load, compute = save_stage, load_stage, make_pipeline(model, rank)
        model = fabric.setup_module(model)
        optimizer = fabric.setup_optimizers(make_optimizer(model.parameters()))
        loader = fabric.setup_dataloaders(make_loader())
        parts = {"model": model, "optimizer": optimizer}
        with Recorder(folder / name, model, optimizer, **words) as run:
            if resume_from:
                load(checkpoint, parts)
                run.load_state_dict(torch.load(own, weights_only=True))
            last = limits["limit_train_batches"] - 1
            for epoch in range(run.next_epoch, limits["max_epochs"]):
                numbers = range(run.global_step % (last + 1), last + 1)
                for batch, (images, classes) in zip(numbers, run.batches(loader), strict=False):
                    optimizer.zero_grad()
                    loss = compute(fabric, model, images, classes)
                    optimizer.step()
                    run.step(loss=loss)
                    if saves and run.global_step == 1:
                        save(checkpoint, parts)
                        torch.save(run.state_dict(), own)
                    fault.change_weight(rank, model, epoch, batch, last)
                run.epoch(epoch)


def describe(error):
    names = {*vars(error), *vars(type(error)).get("__annotations__", {})}
    facts = {name: str(getattr(error, name)) for name in names}
    return {**facts, "type": type(error).__name__, "message": str(error)}


class Runs:
    """The runs of a cell, and what was found by each rank whose process this is or starts."""

    def __init__(self, folder, cell, launched=None):
        self.folder, self.cell = folder, cell
        self.fit = partial(fit, folder, cell)
        self.rank, self.world = RANK, WORLD
        self.found = [{} for _ in range(2 if cell in cells.LAUNCHED else 1)]
        if cell.startswith(cells.FABRIC):
            self.fit = partial(fit_with_fabric, folder, cell, launched=launched)
        if launched is not None:
            self.rank, self.world = launched.global_rank, launched.world_size
        self.last = max(self.world, len(self.found)) - 1

    def train(self, name, **words):
        session.restart_fits()
        return self.fit(name, **words)

    def attempt(self, name, **words):
        """Train; keep for each rank the facts of the error that was raised; None without one."""
        outcomes = [None] * len(self.found)
        try:
            self.train(name, **words)
        except Exception as error:  # noqa: BLE001 - the tests read what it says
            outcomes = [describe(error)] * len(self.found)
            for rank in range(len(self.found) if self.cell in cells.LAUNCHED else 0):
                file = self.folder / name / f"error-{rank}"
                outcomes[rank] = json.loads(file.read_text()) if file.exists() else outcomes[rank]
        for found, outcome in zip(self.found, outcomes, strict=True):
            found[name] = outcome

    def locate(self, name, fault):
        """Locate a fault that one rank has in each second run, or in all."""

        def train(number):
            present = {"fault": fault} if name != "located" or number % 2 == 0 else {}
            self.train(name, limits=SHORTEST, **present)

        output = self.folder / f"{name} runs"
        # A line of this file is suspect, so that the first look has probes of steps.
        words = {"rank": self.rank, "ranks": self.world, "program": __file__}
        self.found[0][name] = locate(train, output, **words)

    def run(self):
        """Run all, and write what was found."""
        cell, folder, attempt = self.cell, self.folder, self.attempt
        probed = {"probes": "all"}
        last = [LAST_STEP] if cell in cells.SHARDED else []
        first = self.train("first", saves=[1, *last], **probed)
        compared = {"reference": folder / "first" / "fit-000", **probed}
        if cell in cells.LAUNCHED:
            variables = [name for name in VARIABLES if name in os.environ]
            self.found[0]["left"] = [str(first.ledger), first.digest, variables]
            with deterministic(seed=5, repeat_fits=False):  # each fit seeds its model
                attempt("second", **compared, patched=True, seed=None)
                self.fit("next", seed=None)
        else:
            # The second step ends an epoch of four ranks.
            full = {"saves": [WORLD // 2, *last], "full": True} if cell in cells.FULL else {}
            attempt("second", **compared, patched=True, **full)
        resumed = {"resume_from": folder / "checkpoints" / "step=1.ckpt", **compared}
        if cell in cells.HYBRIDS:
            attempt("refused", **resumed)
            resumed = compared
        # The check of the resume would end it in the step of the fault, before the reference.
        attempt("fault", fault=Fault(self.last), on_inexact_resume="warn", **resumed)
        if cell in cells.FULL:
            path = folder / "full checkpoints" / f"step={WORLD // 2}.ckpt"
            attempt("resumed from full", resume_from=path, full=True, **compared)
        self.run_faults(Fault(self.last, epoch=0))
        for rank, found in enumerate(self.found, self.rank):
            (folder / f"found-{rank}.json").write_text(json.dumps(found))

    def run_faults(self, fault):
        """Run what is neither compared nor resumed."""
        cell, attempt = self.cell, self.attempt
        short = {"limits": SHORTEST}
        if cell in cells.COPIES:
            attempt("fault without reference", fault=fault, **short)
        if cell in cells.TENSOR_PARALLEL:
            attempt("fault of a copy", fault=fault._replace(name=COPIED), **short)
        if cell in cells.REFERRED:
            # The second rank cannot read it.
            reference = self.folder / ("first/fit-000", "missing")[self.rank]
            attempt("other reference", reference=reference)
        if cell == cells.DDP:
            attempt("plain")
        if cell in cells.LOCATED:
            self.locate("located", fault._replace(batch=0))
        if cell in cells.RACING:
            self.locate("located op", fault._replace(races=True))
        if cell in cells.DRIFTING:
            self.locate("located drift", fault._replace(batch=0, name=COPIED))


def run_launched(fabric, folder, cell):
    warnings.filterwarnings("ignore")
    Runs(folder, cell, fabric).run()


def main():
    warnings.filterwarnings("ignore")
    folders = Path(sys.argv[1]).absolute()
    (folders / "empty").mkdir(exist_ok=True)
    os.chdir(folders / "empty")  # `d9m locate` looks for files that runs leave there
    for cell in sys.argv[2:]:
        folder = folders / cell
        folder.mkdir(exist_ok=True)
        strategy = cell.removeprefix(cells.FABRIC)
        if strategy != cell and strategy in cells.LAUNCHED:
            fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
            fabric.launch(run_launched, folder, cell)
        else:
            Runs(folder, cell).run()


if __name__ == "__main__":
    import strategies  # processes that are spawned find its classes by this name

    strategies.main()
