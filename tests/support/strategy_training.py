"""One rank of trainings under strategies and precisions; see lightning/test_strategies.py.

``python strategy_training.py FOLDER CELL...`` runs each cell: the same training twice, with probes,
the second one with patched operations; resumed from a checkpoint of the first one, with a fault on
one rank; and those of ``d9m locate``. Of the cells in ``LAUNCHED`` this is the process that starts
two ranks for each training.
"""

import json
import os
import sys
import warnings
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from located_runs import locate
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
    deterministic,
)
from lightning_d9m.control import session
from lightning_d9m.errors import D9mError
from lightning_d9m.hashing.training_state import plain_name
from lightning_d9m.patches import registration

RANK = int(os.environ.get("HOROVOD_RANK") or os.environ.get("RANK", "0"))
WORLD = int(os.environ.get("HOROVOD_SIZE") or os.environ.get("WORLD_SIZE", "1"))
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
PLAN = {"0": ColwiseParallel(), "3": RowwiseParallel()}


class FSDPOnCPU(FSDPStrategy):
    """Lightning's FSDPStrategy on a CPU, which it refuses: torch needs the device as well."""

    def _setup_model(self, model):
        return FullyShardedDataParallel(
            model,
            device_id=torch.device("cpu"),
            sharding_strategy=self.sharding_strategy,
            mixed_precision=self.mixed_precision_config,
            **self.kwargs,
        )


def apply_plainly(layers, images):
    """Return the scores of images."""
    return layers(images)


def apply_checkpointed(layers, images):
    """Return the scores; the backward pass computes the first three layers again."""
    hidden = checkpoint(layers[:3], images, use_reentrant=False)
    return layers[3](hidden)


def apply_reentrant(layers, images):
    """Return the scores; the backward pass computes the first three layers again."""
    hidden = checkpoint(layers[:3], images.requires_grad_(), use_reentrant=True)
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


@torch.library.custom_op("d9m_strategies::race", mutates_args=())
def race(values: torch.Tensor) -> torch.Tensor:
    """Return values whose last bits differ from call to call, as those of racing threads do."""
    return values * (1 + int.from_bytes(os.urandom(2), "big") * 2.0**-23)


race.register_autograd(lambda ctx, gradient: gradient)


class RacingReLU(nn.ReLU):
    """Calls an operation that is not deterministic."""

    def forward(self, values):
        return race(super().forward(values))


def change_one_bit(model, name=""):
    """Flip one bit of one weight of this rank: not the last, which the next step may round away."""
    weights = {plain_name(own): weight for own, weight in model.named_parameters()}
    weight = next(own for key, own in weights.items() if key.endswith(name)).detach()
    weight = weight.to_local() if hasattr(weight, "to_local") else weight
    weight.view(-1)[:1].view(INTEGERS[weight.element_size()])[0] ^= 64


def make_optimizer(parameters):
    """Return Adam with an epsilon that is not 0 in half precision, in which weights stay finite."""
    return torch.optim.Adam(parameters, lr=0.01, eps=1e-4)


class Net(L.LightningModule):
    """A small classifier that is divided as ``layout`` says."""

    def __init__(self, layout="", fault=None, apply=apply_plainly):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 10)
        )
        self.layout = layout
        self.fault = fault
        self.apply_layers = apply

    def configure_model(self):
        if "tp" in self.layout:
            parallelize_module(self.layers, self.device_mesh["tensor_parallel"], PLAN)
        if "fsdp" in self.layout:
            mesh = self.device_mesh["data_parallel"]
        elif "hsdp" in self.layout:
            mesh = init_device_mesh("cpu", (2, WORLD // 2), mesh_dim_names=("copies", "shards"))
        else:
            return
        # Pinned memory, the default, needs an accelerator.
        policy = CPUOffloadPolicy(pin_memory=False) if "offload" in self.layout else OffloadPolicy()
        for module in (self.layers[0], self.layers[3], self):
            fully_shard(module, mesh=mesh, offload_policy=policy)

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
        fault = self.fault
        if fault is not None and fault.races and fault.rank == self.global_rank:
            self.layers[1] = RacingReLU()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        fault = self.fault
        if fault is None or fault.races:
            return
        last = self.trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
        at = last if fault.batch is None else batch_idx == fault.batch
        if (fault.rank, fault.epoch) == (self.global_rank, self.current_epoch) and at:
            change_one_bit(self.trainer.model, fault.name)

    def configure_optimizers(self):
        optimizer = make_optimizer(self.parameters())
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]


def model_parallel(*, data, tensor=1):
    """Return a maker of a strategy that divides parameters as DTensors."""
    return lambda full=False: ModelParallelStrategy(
        data_parallel_size=data, tensor_parallel_size=tensor, save_distributed_checkpoint=not full
    )


def keep_in_place(kind, offload_to_cpu, rank0_only):
    """Return how torch gathers a full checkpoint, without moving it."""
    return kind(offload_to_cpu=False, rank0_only=rank0_only)


def fsdp1(**words):
    """Return a maker of FSDP1.

    It gathers full checkpoints where the tensors are: torch crashes if it is to move those of a CPU
    to a CPU.
    """
    fsdp.FullStateDictConfig = partial(keep_in_place, FullStateDictConfig)
    fsdp.api.FullOptimStateDictConfig = partial(keep_in_place, FullOptimStateDictConfig)
    return lambda full=False: FSDPOnCPU(state_dict_type="full" if full else "sharded", **words)


def fsdp1_hybrid():
    """Return FSDP1 that shards on two ranks, twice."""
    mesh = init_device_mesh("cpu", (2, WORLD // 2))
    return fsdp1(sharding_strategy="HYBRID_SHARD", device_mesh=mesh)()


@dataclass(frozen=True)
class Cell:
    """A training: the layout of the model, its strategy, what it applies, how it is compiled."""

    make_strategy: Any
    layout: str = ""
    apply: Any = apply_plainly
    compile: Any = lambda model: model
    words: dict[str, Any] = field(default_factory=dict)
    devices: int = WORLD


def compile_layers(model):
    """Compile a submodule; `aot_eager` does all that Inductor does before it makes kernels."""
    model.layers = torch.compile(model.layers, backend="aot_eager")
    return model


def compile_module(model):
    """Compile the LightningModule."""
    return torch.compile(model, backend="aot_eager")


def on_one(**words):
    """Return a cell of a single process."""
    return Cell(lambda: "auto", **words)


CELLS = {
    "single device": on_one(),
    "single device, bf16-mixed": on_one(words={"precision": "bf16-mixed"}),
    "single device, bf16-true": on_one(words={"precision": "bf16-true"}),
    "single device, 16-true": on_one(words={"precision": "16-true"}),
    "single device, 64-true": on_one(words={"precision": "64-true"}),
    "single device, checkpointing": on_one(apply=apply_checkpointed),
    "single device, reentrant checkpointing": on_one(apply=apply_reentrant),
    "single device, torch.func": on_one(apply=apply_vmapped),
    "single device, float8": on_one(apply=apply_float8),
    "single device, compiled layers": on_one(compile=compile_layers),
    "single device, compiled module": on_one(compile=compile_module),
    "ddp": Cell(lambda: "ddp"),
    "ddp, bf16-mixed": Cell(lambda: "ddp", words={"precision": "bf16-mixed"}),
    "ddp, unused parameters": Cell(lambda: "ddp_find_unused_parameters_true"),
    "ddp, fp16_compress_hook": Cell(lambda: DDPStrategy(ddp_comm_hook=fp16_compress_hook)),
    "ddp, static_graph": Cell(lambda: DDPStrategy(static_graph=True)),
    "ddp_d9m, logical ranks": Cell(lambda: DDPDeterministicStrategy(logical_ranks=4)),
    "fsdp1": Cell(fsdp1()),
    "fsdp1, wrapped layers": Cell(fsdp1(auto_wrap_policy={nn.Linear})),
    "fsdp1, flat parameters": Cell(fsdp1(use_orig_params=False)),
    "fsdp1, hybrid": Cell(fsdp1_hybrid),
    "fsdp2": Cell(model_parallel(data=WORLD), "fsdp"),
    "fsdp2, bf16-true": Cell(model_parallel(data=WORLD), "fsdp", words={"precision": "bf16-true"}),
    "fsdp2, CPU offload": Cell(model_parallel(data=WORLD), "fsdp, offload"),
    "hsdp": Cell(model_parallel(data=WORLD), "hsdp"),
    "tp": Cell(model_parallel(data=1, tensor=WORLD), "tp"),
    "fsdp2 and tp": Cell(model_parallel(data=WORLD // 2, tensor=2), "tp and fsdp"),
}
CELLS |= {f"{name}, 4 ranks": CELLS[name] for name in ("fsdp1", "fsdp2", "tp")}
LAUNCHED = ("ddp_spawn", "ddp_fork")
CELLS |= {name: Cell(name.__str__, devices=2) for name in LAUNCHED}
# horovodrun starts a process for each rank, in which Lightning has one device.
CELLS |= {
    "horovod_d9m": Cell(lambda: "horovod_d9m", devices=1),
    "horovod_d9m, logical ranks": Cell(
        lambda: HorovodDeterministicStrategy(logical_ranks=4), devices=1
    ),
}
FLAT = "fsdp1, flat parameters"
HYBRID = "fsdp1, hybrid"
# These are resumed from full checkpoints, too.
FULL = ("fsdp1", "fsdp2", "tp", "tp, 4 ranks", "hsdp", "fsdp2 and tp")
# In these `d9m locate` finds the fault.
LOCATED = (
    *("single device", "single device, compiled module", "ddp", "ddp_d9m, logical ranks"),
    *("fsdp1", "fsdp2", "tp"),
)
# In these an operation races, too.
RACING = ("ddp", "fsdp2")
# In these a rank changes a copy that it has with others.
COPIES = ("ddp", "horovod", "hsdp", "fsdp1, hybrid")
# Strategies that divide the weights refuse replays.
REFUSED = ("fsdp1", "fsdp2", "tp")
# In these a rank drifts apart in every run.
DRIFTING = ("ddp", "tp")
COPIED = "layers.3.bias"  # each rank of tensor parallelism has it
VARIABLES = ("CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO")
SHORTEST = {"max_epochs": 1, "limit_train_batches": 2, "limit_val_batches": 0}
SHORT = SHORTEST | {"max_epochs": 2, "limit_val_batches": 1, "num_sanity_val_steps": 0}


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
def patches_counted(folder, rank, *, on=True):
    """Patch the operations of a CPU, and write how often one was called."""
    if not on:
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


class PatchingCallback(L.Callback):
    """Patches operations during a fit."""

    def __init__(self, folder):
        self.folder = folder

    def setup(self, trainer, pl_module, stage):
        self.stack = ExitStack()
        self.stack.enter_context(patches_counted(self.folder, trainer.global_rank))

    def teardown(self, trainer, pl_module, stage):
        self.stack.close()


class SomeSteps(ModelCheckpoint):
    """Saves checkpoints after the first step, the last one, and the second one of four ranks."""

    def on_train_batch_end(self, trainer, *arguments):
        """Save if one of these steps ends."""
        last = trainer.max_epochs * trainer.num_training_batches
        if trainer.global_step in {1, WORLD // 2, last}:
            super().on_train_batch_end(trainer, *arguments)


def fit(  # noqa: PLR0913 - one keyword for each kind of run
    folder, cell, name, *, fault=None, resume_from=None, saves=False, full=False, patched=False,
    limits=SHORT, **words,
):  # fmt: skip
    """Train; return the callback."""
    callback = ErrorKeepingCallback(**({"seed": 5, "ledger_dir": folder / name} | words))
    callbacks = [callback, *([PatchingCallback(folder / name)] if patched else [])]
    settings = dict(QUIET)
    if saves:
        settings["enable_checkpointing"] = True
        callbacks.append(
            SomeSteps(
                folder / ("full checkpoints" if full else "checkpoints"),
                every_n_train_steps=1,
                save_top_k=-1,
                filename="{step}",
                save_on_train_epoch_end=False,
            )
        )
    kind = CELLS[cell]
    torch.manual_seed(7)
    model = kind.compile(Net(kind.layout, fault, kind.apply))
    if cell == FLAT:
        model.configure_optimizers = lambda: make_optimizer(model.trainer.model.parameters())
    trainer = L.Trainer(
        strategy=kind.make_strategy(full=True) if full else kind.make_strategy(),
        devices=kind.devices,
        callbacks=callbacks,
        **limits,
        **settings,
        **kind.words,
    )
    trainer.fit(model, make_loader(), make_loader(shuffle=False), ckpt_path=resume_from)
    return callback


def describe(error):
    """Return the facts of an error."""
    names = {*vars(error), *vars(type(error)).get("__annotations__", {})}
    facts = {name: str(getattr(error, name)) for name in names}
    return {**facts, "type": type(error).__name__, "message": str(error)}


def list_outcomes(folder, cell, name, **words):
    """Train as a run of its own would.

    Returns:
        For each rank whose process this is, or that it started, the facts of the error that was
        raised; None without one.
    """
    session._fits = 0
    errors = [folder / name / f"error-{rank}" for rank in range(CELLS[cell].devices)]
    try:
        fit(folder, cell, name, **words)
    except Exception as error:  # noqa: BLE001 - the tests read what it says
        if cell not in LAUNCHED:
            return [describe(error)]
        found = [file.read_text() if file.exists() else "null" for file in errors]
        return [json.loads(text) or describe(error) for text in found]
    return [None] * (len(errors) if cell in LAUNCHED else 1)


def locate_fault(folder, cell, fault, name="located"):
    """Locate a fault that one rank has in each second run, or in all; return what is printed."""

    def train(number):
        session._fits = 0
        present = fault if name != "located" or number % 2 == 0 else None
        fit(folder, cell, name, fault=present, limits=SHORTEST)

    return locate(train, folder / f"{name} runs", rank=RANK, ranks=WORLD)


def find_more(folder, cell, last):
    """Locate the faults of a cell on its last rank."""
    found = {}
    if cell in LOCATED:
        found["located"] = locate_fault(folder, cell, Fault(last, epoch=0, batch=0))
    if cell in RACING:
        race, name = Fault(last, races=True), "located op"
        found[name] = locate_fault(folder, cell, race, name)
    if cell in DRIFTING:
        drift, name = Fault(last, epoch=0, batch=0, name=COPIED), "located drift"
        found[name] = locate_fault(folder, cell, drift, name)
    return found


def run(folder, cell):
    """Run a cell; return what each rank found whose process this is, or that it started."""
    session._fits = 0
    # Where a strategy divides the weights, replays are refused.
    replay = {} if CELLS[cell].layout or cell.startswith("fsdp") else {"replay_every": 2}
    probed = {"probes": "all", **replay}
    first = fit(folder, cell, "first", saves=True, **probed)
    compared = {"reference": folder / "first" / "fit-000", **probed}
    found = [{} for _ in range(2 if cell in LAUNCHED else 1)]

    def attempt(name, **words):
        for entry, outcome in zip(found, list_outcomes(folder, cell, name, **words), strict=True):
            entry[name] = outcome

    if cell in LAUNCHED:
        variables = [name for name in VARIABLES if name in os.environ]
        found[0]["left"] = [str(first.ledger), first.digest, variables]
        with deterministic(seed=5):
            attempt("second", **compared, patched=True, seed=None)
            fit(folder, cell, "next", seed=None)
    else:
        full = {"saves": True, "full": True} if cell in FULL else {}
        attempt("second", **compared, patched=True, **full)
    last = max(WORLD, CELLS[cell].devices) - 1
    resumed = {"resume_from": folder / "checkpoints" / "step=1.ckpt", **compared}
    if cell == HYBRID:
        attempt("refused", **resumed)
        resumed = compared
    attempt("fault", fault=Fault(last), **resumed)
    short = {"limits": SHORTEST}
    if cell.startswith(COPIES):
        attempt("fault without reference", fault=Fault(last, epoch=0), **short)
    if "tp" in CELLS[cell].layout:
        attempt("fault of a copy", fault=Fault(last, epoch=0, name=COPIED), **short)
    if cell in REFUSED:
        attempt("replayed", replay_every=2, **short)
    if cell in FULL:
        # The second step ends an epoch of four ranks.
        path = folder / "full checkpoints" / f"step={WORLD // 2}.ckpt"
        attempt("resumed from full", resume_from=path, full=True, **compared)
    found[0] |= find_more(folder, cell, last)
    return found


def main():
    """Run cells, and write what was found."""
    warnings.filterwarnings("ignore")
    for cell in sys.argv[2:]:
        folder = Path(sys.argv[1]) / cell
        for rank, found in enumerate(run(folder, cell), RANK):
            (folder / f"found-{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
