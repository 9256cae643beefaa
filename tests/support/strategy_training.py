"""One rank of trainings under strategies and precisions; see lightning/test_strategies.py.

``python strategy_training.py FOLDER CELL...`` runs each cell: the same training twice, with a fault
on one rank, with probes twice, with patched operations, interrupted and resumed. Of the cells in
``LAUNCHED`` this is the process that starts two ranks for each training.
"""

import json
import os
import sys
import warnings
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint
from trainings import QUIET, make_loader

from lightning_d9m import DeterminismCallback, deterministic
from lightning_d9m.control import session
from lightning_d9m.errors import D9mError
from lightning_d9m.patches import registration

RANK = int(os.environ.get("RANK", "0"))
WORLD = int(os.environ.get("WORLD_SIZE", "1"))
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


class Net(L.LightningModule):
    """A small classifier that is divided as ``layout`` says."""

    def __init__(self, layout="", faulty=None, apply=apply_plainly):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 10)
        )
        self.layout = layout
        self.faulty = faulty
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
        for module in (self.layers[0], self.layers[3], self):
            fully_shard(module, mesh=mesh)

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

    def on_train_batch_end(self, *_):
        """Change one weight of one rank by one unit in the last place, after the last step."""
        last = self.trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
        if self.faulty == self.global_rank and last and self.current_epoch == 1:
            weight = next(self.parameters()).detach()
            weight = weight.to_local() if hasattr(weight, "to_local") else weight
            weight.view(-1)[:1].view(INTEGERS[weight.element_size()])[0] += 1

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]


def model_parallel(*, data, tensor=1, full=False):
    """Return a maker of a strategy that divides parameters as DTensors."""
    return lambda: ModelParallelStrategy(
        data_parallel_size=data, tensor_parallel_size=tensor, save_distributed_checkpoint=not full
    )


def fsdp1(**words):
    """Return a maker of FSDP1; full checkpoints of it crash torch on a CPU."""
    return lambda: FSDPOnCPU(state_dict_type="sharded", **words)


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
    "fsdp1": Cell(fsdp1()),
    "fsdp1, wrapped layers": Cell(fsdp1(auto_wrap_policy={nn.Linear})),
    "fsdp1, flat parameters": Cell(fsdp1(use_orig_params=False)),
    "fsdp1, hybrid": Cell(fsdp1_hybrid),
    "fsdp2": Cell(model_parallel(data=WORLD), "fsdp"),
    "fsdp2, bf16-true": Cell(model_parallel(data=WORLD), "fsdp", words={"precision": "bf16-true"}),
    "fsdp2, full checkpoints": Cell(model_parallel(data=WORLD, full=True), "fsdp"),
    "hsdp": Cell(model_parallel(data=WORLD), "hsdp"),
    "tp": Cell(model_parallel(data=1, tensor=WORLD), "tp"),
    "tp, full checkpoints": Cell(model_parallel(data=1, tensor=WORLD, full=True), "tp"),
    "fsdp2 and tp": Cell(model_parallel(data=WORLD // 2, tensor=2), "tp and fsdp"),
}
LAUNCHED = ("ddp_spawn", "ddp_fork")
CELLS |= {name: Cell(name.__str__, devices=2) for name in LAUNCHED}
FLAT = "fsdp1, flat parameters"
VARIABLES = ("CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO")


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


class PatchingCallback(L.Callback):
    """Patches the operations of a CPU during a fit, and writes how often one was called."""

    def __init__(self, folder):
        self.folder = folder

    def setup(self, trainer, pl_module, stage):
        self.calls = 0
        call = registration.Kernel.__call__

        def count(kernel, *args, **kwargs):
            self.calls += 1
            return call(kernel, *args, **kwargs)

        self.stack = ExitStack()
        self.stack.enter_context(mock.patch.object(registration.Kernel, "__call__", count))
        self.stack.enter_context(registration.patches_applied("CPU"))

    def teardown(self, trainer, pl_module, stage):
        self.stack.close()
        (self.folder / f"calls-{trainer.global_rank}").write_text(str(self.calls))


def fit(
    folder, cell, name, *, faulty=None, resume_from=None, every=None, patched=False, **words
):  # fmt: skip
    """Train; return the callback."""
    callback = ErrorKeepingCallback(**({"seed": 5, "ledger_dir": folder / name} | words))
    callbacks = [callback, *([PatchingCallback(folder / name)] if patched else [])]
    settings = dict(QUIET)
    if every is not None:
        settings["enable_checkpointing"] = True
        callbacks.append(
            ModelCheckpoint(
                folder / "checkpoints",
                every_n_train_steps=every,
                save_top_k=-1,
                filename="{step}",
                save_on_train_epoch_end=False,
            )
        )
    kind = CELLS[cell]
    torch.manual_seed(7)
    model = kind.compile(Net(kind.layout, faulty, kind.apply))
    if cell == FLAT:
        model.configure_optimizers = lambda: torch.optim.Adam(
            model.trainer.model.parameters(), lr=0.01
        )
    trainer = L.Trainer(
        max_epochs=2,
        strategy=kind.make_strategy(),
        devices=kind.devices,
        callbacks=callbacks,
        **settings,
        **kind.words,
    )
    trainer.fit(model, make_loader(), make_loader(shuffle=False), ckpt_path=resume_from)
    return callback


def describe(error):
    """Return the facts of an error."""
    facts = {name: str(value) for name, value in vars(error).items()}
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


def run(folder, cell):
    """Run a cell; return what each rank found whose process this is, or that it started."""
    session._fits = 0
    first = fit(folder, cell, "first")
    reference = folder / "first" / "fit-000"
    found = [{} for _ in range(2 if cell in LAUNCHED else 1)]

    def attempt(name, **words):
        for entry, outcome in zip(found, list_outcomes(folder, cell, name, **words), strict=True):
            entry[name] = outcome

    if cell in LAUNCHED:
        variables = [name for name in VARIABLES if name in os.environ]
        found[0]["left"] = [str(first.ledger), first.digest, variables]
        with deterministic(seed=5):
            attempt("second", reference=reference, every=1, seed=None)
            fit(folder, cell, "next", seed=None)
    else:
        attempt("second", reference=reference, every=1)
    if cell != FLAT:
        attempt("fault", faulty=CELLS[cell].devices - 1, reference=reference)
        attempt("fault without reference", faulty=CELLS[cell].devices - 1)
    attempt("probed", probes="all")
    attempt("probed again", probes="all")
    attempt("replayed", replay_every=2)
    attempt("patched", patched=True, reference=reference)
    for step in (1, 2):
        path = folder / "checkpoints" / f"step={step}.ckpt"
        attempt(f"resumed at {step}", resume_from=path, reference=reference)
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
