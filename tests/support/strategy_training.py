"""One rank of trainings under strategies that divide a model; see lightning/test_strategies.py.

``python strategy_training.py FOLDER CELL...`` runs each cell: the same training twice, with a fault
on one rank, with probes twice, interrupted and resumed.
"""

import json
import os
import sys
import warnings
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from trainings import QUIET, make_loader

from lightning_d9m import DeterminismCallback
from lightning_d9m.control import session

RANK = int(os.environ.get("RANK", "0"))
WORLD = int(os.environ.get("WORLD_SIZE", "1"))
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


class Net(L.LightningModule):
    """A small classifier that is divided as ``layout`` says."""

    def __init__(self, layout="", faulty=None):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 10)
        )
        self.layout = layout
        self.faulty = faulty

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
        loss = nn.functional.cross_entropy(self.layers(images), classes)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, _):
        images, classes = batch
        self.log("val_loss", nn.functional.cross_entropy(self.layers(images), classes))

    def on_train_batch_end(self, *_):
        """Change one weight of one rank by one unit in the last place, after the last step."""
        last = self.trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
        if self.faulty == RANK and last and self.current_epoch == 1:
            weight = self.layers[0].weight.detach()
            weight = weight.to_local() if hasattr(weight, "to_local") else weight
            weight.view(-1)[:1].view(torch.int32)[0] += 1

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


# Name: layout of the model, and the strategy.
CELLS = {
    "ddp": ("", lambda: "ddp"),
    "ddp, unused parameters": ("", lambda: "ddp_find_unused_parameters_true"),
    "ddp, fp16_compress_hook": ("", lambda: DDPStrategy(ddp_comm_hook=fp16_compress_hook)),
    "ddp, static_graph": ("", lambda: DDPStrategy(static_graph=True)),
    "fsdp1": ("", fsdp1()),
    "fsdp1, wrapped layers": ("", fsdp1(auto_wrap_policy={nn.Linear})),
    "fsdp1, flat parameters": ("", fsdp1(use_orig_params=False)),
    "fsdp1, hybrid": ("", fsdp1_hybrid),
    "fsdp2": ("fsdp", model_parallel(data=WORLD)),
    "fsdp2, full checkpoints": ("fsdp", model_parallel(data=WORLD, full=True)),
    "hsdp": ("hsdp", model_parallel(data=WORLD)),
    "tp": ("tp", model_parallel(data=1, tensor=WORLD)),
    "tp, full checkpoints": ("tp", model_parallel(data=1, tensor=WORLD, full=True)),
    "fsdp2 and tp": ("tp and fsdp", model_parallel(data=WORLD // 2, tensor=2)),
}
FLAT = "fsdp1, flat parameters"


def fit(folder, cell, name, *, faulty=None, checkpoint=None, every=None, **words):
    """Train as a run of its own would; return the Trainer."""
    session._fits = 0
    callbacks = [DeterminismCallback(seed=5, ledger_dir=folder / name, **words)]
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
    layout, make_strategy = CELLS[cell]
    torch.manual_seed(7)
    model = Net(layout, faulty)
    if cell == FLAT:
        model.configure_optimizers = lambda: torch.optim.Adam(
            model.trainer.model.parameters(), lr=0.01
        )
    trainer = L.Trainer(
        max_epochs=2, strategy=make_strategy(), devices=WORLD, callbacks=callbacks, **settings
    )
    trainer.fit(model, make_loader(), make_loader(shuffle=False), ckpt_path=checkpoint)
    return trainer


def outcome(func):
    """Return the facts of the error that a training raises; None without one."""
    try:
        func()
    except Exception as error:  # noqa: BLE001 - the tests read what it says
        facts = {name: str(value) for name, value in vars(error).items()}
        return {**facts, "type": type(error).__name__, "message": str(error)}
    return None


def run(folder, cell):
    """Run a cell; return what was found."""
    fit(folder, cell, "first")
    reference = folder / "first" / "fit-000"
    found = {}

    def attempt(name, **words):
        found[name] = outcome(lambda: fit(folder, cell, name, **words))

    attempt("second", reference=reference)
    if cell != FLAT:
        attempt("fault", faulty=1, reference=reference)
        attempt("fault without reference", faulty=1)
    attempt("probed", probes="all")
    attempt("probed again", probes="all")
    attempt("replayed", replay_every=2)
    attempt("saved", every=1, reference=reference)
    for step in (1, 2):
        path = folder / "checkpoints" / f"step={step}.ckpt"
        attempt(f"resumed at {step}", checkpoint=path, reference=reference)
    return found


def main():
    """Run cells, and write what was found."""
    warnings.filterwarnings("ignore")
    for cell in sys.argv[2:]:
        folder = Path(sys.argv[1]) / cell
        found = run(folder, cell)
        (folder / f"found-{RANK}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
