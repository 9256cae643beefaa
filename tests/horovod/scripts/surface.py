"""Exercise Lightning's surface on every rank and write the results.

Usage: surface.py FOLDER
"""

import json
import sys
import warnings
from itertools import chain
from pathlib import Path
from textwrap import wrap

import horovod.torch as hvd
import lightning.pytorch as pl
import models
import torch
import torchmetrics
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import nn
from torch.nn import functional
from trainings import QUIET

from lightning_d9m import DeterminismCallback, HorovodDeterministicStrategy
from lightning_d9m.engine.hashing.digest import digest
from lightning_d9m.engine.ledger.folder import read_ledger
from lightning_d9m.engine.ledger.format.records import Batch
from lightning_d9m.errors import D9mError

warnings.filterwarnings("ignore")
folder = Path(sys.argv[1])


class Base(pl.LightningModule):
    """A regression."""

    def __init__(self):
        super().__init__()
        self.net = models.network()

    def training_step(self, batch, _):
        loss = functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def fit(model, *loaders, strategy="horovod_d9m", **options):
    """Train from a fixed seed."""
    pl.seed_everything(5, verbose=False)
    trainer = pl.Trainer(strategy=strategy, **QUIET | {"max_epochs": 1} | options)
    trainer.fit(model, models.loader(), *loaders)
    return trainer


class Full(Base):
    """Validates, predicts, gathers metrics, and calls collectives between steps."""

    def __init__(self):
        super().__init__()
        self.error, self.seen = torchmetrics.MeanSquaredError(), torchmetrics.CatMetric()

    def on_train_start(self):
        rank, strategy = self.global_rank, self.trainer.strategy
        sampler = self.trainer.train_dataloader.sampler
        self.sampler = [type(sampler).__name__, sampler.rank, sampler.num_replicas]
        sent = {"from": rank, "path": folder}
        self.collectives = {
            "all_gather": self.all_gather(torch.full((3,), float(rank))).tolist(),
            "broadcast": strategy.broadcast(sent) == sent | {"from": 0},
            "broadcast_1": strategy.broadcast(("from", rank), src=1),
            "reduce": strategy.reduce(torch.tensor([1 + rank]), reduce_op="sum").tolist(),
            "decision": strategy.reduce_boolean_decision(rank == 0),
            "horovod": hvd.allreduce(torch.ones(1), op=hvd.Sum).item(),
        }
        strategy.barrier("ours")

    def validation_step(self, batch, index):
        self.error(self.net(batch[0]), batch[1])
        # A different number of values on each rank: torchmetrics gathers uneven states.
        self.seen.update(torch.full((self.global_rank + 1,), float(self.global_rank)))
        self.log("mse", self.error)
        self.log("rank_mean", float(self.global_rank), sync_dist=True)
        self.log("rank_max", float(self.global_rank), sync_dist=True, reduce_fx="max")

    def on_validation_epoch_end(self):
        self.values = self.seen.compute().tolist()
        self.seen.reset()

    def predict_step(self, batch, index):
        return self.net(batch[0])


def run_loops():
    """Fit with validation, metrics and callbacks, and predict; return what each rank has."""
    model = Full()
    saved = ModelCheckpoint(dirpath=folder / "checkpoints", monitor="mse", save_last=True)
    words = {"enable_checkpointing": True, "num_sanity_val_steps": 0}
    own = fit(
        model,
        models.loader(24, shuffle=False),
        callbacks=[saved, EarlyStopping("mse", patience=5)],
        **words,
    )
    metrics = {name: float(value) for name, value in own.callback_metrics.items()}
    predicted = own.predict(model, models.loader(16, shuffle=False))
    ranks = [own.global_rank, own.world_size, own.local_rank, own.is_global_zero, *model.sampler]
    return ranks, {
        "metrics": metrics,
        "predicted": sum(len(part) for part in predicted),
        "values": model.values,
        "lr": own.optimizers[0].param_groups[0]["lr"],
        "best": saved.best_model_path,
        "saved": max(path.name for path in (folder / "checkpoints").iterdir()),
        "collectives": model.collectives,
    }


class Probed(Base):
    """Keeps the digests of gradients before and after the exchange."""

    def __init__(self):
        super().__init__()
        self.net[3].p = 0.0
        self.kept = {"local_gradient": [], "gradient": []}

    def training_step(self, batch, _):
        loss = functional.mse_loss(self.net(batch[0]), batch[1])
        names, weights = zip(*self.named_parameters(), strict=True)
        local = torch.autograd.grad(loss, weights, retain_graph=True)
        means = [self.all_gather(gradient).sum(0) / 2 for gradient in local]
        for found, values in zip(self.kept.values(), (local, means), strict=True):
            found.append(dict(zip(names, map(digest, values), strict=True)))
        return loss


def probe():
    """Compare probes of gradients before and after the exchange; return the differences."""
    model = Probed()
    callback = DeterminismCallback(probes=[*model.kept], ledger_dir=folder / "probes")
    strategy = HorovodDeterministicStrategy(bucket_bytes=256)
    rank = fit(model, strategy=strategy, callbacks=[callback]).global_rank
    batches = [
        list(zip(chain(*batch.layouts), wrap(batch.digests.hex(), 32), strict=True))
        for batch in read_ledger(folder / "probes" / "fit-000").records(rank)
        if isinstance(batch, Batch)
    ]
    wrong = [
        (number, kind, name)
        for number, entries in enumerate(batches)
        for (kind, name, _), found in entries
        if found != model.kept[kind][number][name]
    ]
    return {"batches": len(batches), "places": len(batches[0]), "wrong": wrong}


class Stray(Base):
    """Runs a backward pass that no rank sees."""

    automatic_optimization = False

    def training_step(self, batch, _):
        functional.mse_loss(self.net(batch[0]), batch[1]).backward()


class Foreign(Base):
    """Trains a parameter that the module does not have."""

    def configure_optimizers(self):
        self.foreign = [nn.Parameter(torch.zeros(3))]
        return torch.optim.SGD([*self.parameters(), *self.foreign], lr=0.1)


class Reducing(Base):
    """Calls a collective of Horovod in a step."""

    def training_step(self, batch, _):
        hvd.allreduce(torch.ones(1))
        return super().training_step(batch, _)


def find_refusals():
    """Return the error of each mistake that would stay silent."""
    messages = {}
    for name, kind, logical_ranks in (
        ("stray", Stray, None),
        ("foreign", Foreign, None),
        ("collective", Reducing, 4),
        ("too many", Base, 1),
    ):
        strategy = HorovodDeterministicStrategy(logical_ranks=logical_ranks)
        try:
            fit(
                kind(), strategy=strategy, callbacks=[DeterminismCallback(ledger_dir=folder / name)]
            )
        except D9mError as error:
            messages[name] = str(error)
    return messages


ranks, found = run_loops()
found["probes"], refusals = probe(), find_refusals()
last = fit(Base())  # after the errors, and a collective can be called again
hvd.allreduce(torch.ones(1))
result = {"ranks": ranks, "found": found, "refusals": refusals}
(folder / f"rank-{last.global_rank}.json").write_text(json.dumps(result))
# Rank 1 exits; a script in which only rank 0 saves at the end must end, too.
if last.global_rank == 0:
    last.save_checkpoint(folder / "late.ckpt")
