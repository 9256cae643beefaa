"""Exercise Lightning's surface on every rank and write the results.

Usage: surface.py FOLDER
"""

import json
import sys
import warnings
from itertools import chain
from pathlib import Path
from textwrap import wrap

import horovod.torch
import models
import pytorch_lightning as pl
import torch
import torchmetrics
from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint
from torch import nn
from torch.nn import functional

from lightning_d9m import DeterminismCallback
from lightning_d9m.errors import D9mError
from lightning_d9m.hashing.digest import digest
from lightning_d9m.horovod.strategy import HorovodDeterministicStrategy
from lightning_d9m.ledger.folder import read_ledger
from lightning_d9m.ledger.format.records import Batch

warnings.filterwarnings("ignore")
folder = Path(sys.argv[1])
found = {}


def trainer(strategy="horovod_d9m", **options):
    quiet = {
        "max_epochs": 2,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return pl.Trainer(accelerator="cpu", strategy=strategy, **(quiet | options))


class Base(pl.LightningModule):
    """Regression with a given module."""

    def __init__(self, net, lr=0.05):
        super().__init__()
        self.net = net
        self.lr = lr

    def training_step(self, batch, _):
        loss = functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


def check(function):
    """Run a check from a fixed seed and store its result under its name."""
    pl.seed_everything(5, verbose=False)
    found[function.__name__] = function()
    return function


def fit(model, **options):
    own = trainer(**options)
    own.fit(model, models.loader())
    return own


@check
def loops():
    """Fit with validation, test, predict, metrics, callbacks and sync_dist."""

    class Model(Base):
        def __init__(self):
            super().__init__(models.network())
            self.error = torchmetrics.MeanSquaredError()
            self.seen = torchmetrics.CatMetric()
            self.samplers = []

        def on_train_start(self):
            sampler = self.trainer.train_dataloader.sampler
            self.samplers = [type(sampler).__name__, sampler.rank, sampler.num_replicas]

        def validation_step(self, batch, index):
            out = self.net(batch[0])
            self.error(out, batch[1])
            # A different number of values on each rank: torchmetrics gathers uneven states.
            self.seen.update(torch.full((self.global_rank + 1,), float(self.global_rank)))
            self.log("mse", self.error)
            self.log("rank_mean", float(self.global_rank), sync_dist=True)
            self.log("rank_max", float(self.global_rank), sync_dist=True, reduce_fx="max")

        def on_validation_epoch_end(self):
            self.values = self.seen.compute().tolist()
            self.seen.reset()

        def test_step(self, batch, index):
            self.log("test_loss", functional.mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)

        def predict_step(self, batch, index):
            return self.net(batch[0])

    model = Model()
    saved = ModelCheckpoint(dirpath=folder / "checkpoints", monitor="mse", save_last=True)
    own = trainer(callbacks=[saved, EarlyStopping("mse", patience=5)], enable_checkpointing=True)
    own.fit(model, models.loader(), models.loader(24, shuffle=False))
    metrics = {name: float(value) for name, value in own.callback_metrics.items()}
    tested = own.test(model, models.loader(16, shuffle=False), verbose=False)[0]
    predicted = own.predict(model, models.loader(16, shuffle=False))
    ranks = [own.global_rank, own.world_size, own.local_rank, own.is_global_zero]
    equal = {
        "metrics": metrics,
        "test": tested,
        "predicted": sum(len(part) for part in predicted),
        "values": model.values,
        "lr": own.optimizers[0].param_groups[0]["lr"],
        "best": saved.best_model_path,
        "saved": max(path.name for path in (folder / "checkpoints").iterdir()),
    }
    return {"ranks": ranks + model.samplers, "equal": equal}


@check
def collectives():
    """Objects and tensors across the ranks, and a collective of Horovod between steps."""
    noted = {}

    class Model(Base):
        def on_train_start(self):
            rank = self.global_rank
            noted["all_gather"] = self.all_gather(torch.full((3,), float(rank))).tolist()
            strategy = self.trainer.strategy
            sent = {"from": rank, "path": folder}
            noted["broadcast"] = strategy.broadcast(sent) == sent | {"from": 0}
            noted["broadcast_1"] = strategy.broadcast(("from", rank), src=1)
            noted["reduce"] = strategy.reduce(torch.tensor([1 + rank]), reduce_op="sum").tolist()
            noted["decision"] = strategy.reduce_boolean_decision(rank == 0)
            noted["horovod"] = horovod.torch.allreduce(torch.ones(1), op=horovod.torch.Sum).item()
            strategy.barrier("ours")

    fit(Model(models.network()))
    return noted


@check
def parameters():
    """Unused and shared parameters, channels_last and sparse gradients."""

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(8, 8)
            self.second = nn.Linear(8, 8)
            self.second.weight = self.first.weight
            self.unused = nn.Linear(4, 4)
            self.conv = nn.Conv2d(1, 4, 3, padding=1).to(memory_format=torch.channels_last)
            self.phases = nn.Parameter(torch.randn(8, dtype=torch.complex64))
            self.embedding = nn.Embedding(5, 1, sparse=True)
            self.brain = nn.Parameter(torch.randn(8).bfloat16())
            self.last = nn.Linear(8, 1)

        def forward(self, x):
            x = self.second(self.first(x)) * self.phases.abs() + self.brain.float()
            image = x.view(-1, 1, 2, 4).contiguous(memory_format=torch.channels_last)
            x = x + self.conv(image).mean(1).flatten(1)
            index = (x.detach()[:, 0] > 0).long()
            return self.last(x) + self.embedding(index)

    model = Base(Tied())
    fit(model, strategy=HorovodDeterministicStrategy(bucket_bytes=256))
    net = model.net
    tied = net.first.weight is net.second.weight
    return [models.digest(model), net.unused.weight.grad is None, tied]


@check
def probes():
    """Compare probes of gradients before and after the exchange; return the differences."""
    own, mean = [], []

    class Model(Base):
        def training_step(self, batch, _):
            loss = functional.mse_loss(self.net(batch[0]), batch[1])
            names, weights = zip(*self.named_parameters(), strict=True)
            local = torch.autograd.grad(loss, weights, retain_graph=True)
            own.append({n: digest(g) for n, g in zip(names, local, strict=True)})
            means = [self.all_gather(gradient).sum(0) / 2 for gradient in local]
            mean.append({n: digest(g) for n, g in zip(names, means, strict=True)})
            return loss

    model = Model(models.network())
    model.net[3].p = 0.0
    kinds = ["local_gradient", "gradient"]
    callback = DeterminismCallback(probes=kinds, ledger_dir=folder / "probes")
    strategy = HorovodDeterministicStrategy(bucket_bytes=256)
    rank = fit(model, strategy=strategy, callbacks=[callback], max_epochs=1).global_rank
    batches = [
        list(zip(chain(*batch.layouts), wrap(batch.digests.hex(), 32), strict=True))
        for batch in read_ledger(folder / "probes" / "fit-000").records(rank)
        if isinstance(batch, Batch)
    ]
    wrong = [
        (batch, kind, name)
        for batch, entries in enumerate(batches)
        for (kind, name, _), digest in entries
        if digest != (own if kind == "local_gradient" else mean)[batch][name]
    ]
    return {"batches": len(batches), "places": len(batches[0]), "wrong": wrong}


@check
def refusals():
    """Mistakes that would stay silent are errors on both ranks."""
    messages = {}

    class Stray(Base):
        automatic_optimization = False

        def training_step(self, batch, _):
            functional.mse_loss(self.net(batch[0]), batch[1]).backward()

    class Foreign(Base):
        def configure_optimizers(self):
            self.foreign = [nn.Parameter(torch.zeros(3))]
            return torch.optim.SGD([*self.parameters(), *self.foreign], lr=0.1)

    for kind in (Stray, Foreign):
        try:
            fit(kind(models.network()))
        except D9mError as error:
            messages[kind.__name__] = str(error)
    return messages


last = fit(Base(models.network()), max_epochs=1)
rank = last.global_rank
(folder / f"rank-{rank}.json").write_text(json.dumps(found))
# Rank 1 exits; a script in which only rank 0 saves at the end must end, too.
if rank == 0:
    last.save_checkpoint(folder / "late.ckpt")
