"""One rank of trainings with logical ranks; see lightning/logical_ranks/test_training.py.

Usage: logical_trainings.py FOLDER [WHAT...], each of WHAT "straight", "killed" (the last rank, by
the system in the second epoch) or the name of a checkpoint in FOLDER to resume from.
"""

import json
import logging
import os
import signal
import sys
import warnings
from functools import partial
from pathlib import Path
from unittest import mock

import lightning as L
import torch
from lightning.pytorch.callbacks import (
    BasePredictionWriter,
    EarlyStopping,
    EMAWeightAveraging,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import CatMetric, MeanMetric, MetricCollection
from trainings import QUIET, NoisyDigits, read_digits

from lightning_d9m import DDPDeterministicStrategy, DeterminismCallback
from lightning_d9m.engine.control import session
from lightning_d9m.engine.control.data.resumable_sampler import MicroBatchIndices
from lightning_d9m.engine.hashing.digest import digest_value
from lightning_d9m.integrations.strategies.steps import loaders, steps
from lightning_d9m.integrations.strategies.sums import gradients, sandbox

PROCESSES = int(os.environ.get("WORLD_SIZE", "1"))
BATCH_SIZE = 3
# The networks, the numbers of logical ranks with which each is trained, and ways in which users
# train.
TRAININGS = {
    "mlp 8": lambda: {"loader": {"num_workers": 1, "persistent_workers": True}},
    "cnn 4": lambda: {"accumulate_grad_batches": 2},
    "cnn 5": lambda: {"loader": {"drop_last": True}},
    "transformer 6": dict,
    "branches 2": lambda: {
        "several": True,
        "plugins": MixedPrecision(
            "16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**60, growth_interval=2)
        ),
    },
}
# Those of more than two processes.
LARGE = {3: "transformer 6", 8: "mlp 8"}


class Classifier(L.LightningModule):
    """A classifier of digits, with a schedule by steps, and logged values."""

    def __init__(self, net):
        super().__init__()
        self.net = net
        self.mean_loss = MeanMetric()
        self.scores = MetricCollection([MeanMetric(), CatMetric()])

    def compute_loss(self, batch):
        if isinstance(batch, dict):  # of several loaders
            return sum(map(self.compute_loss, batch.values()))
        images, classes = batch
        return nn.functional.cross_entropy(self.net(images), classes)

    def training_step(self, batch, batch_idx):
        loss = self.compute_loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log("least", loss, reduce_fx="min", on_epoch=True)
        self.mean_loss(loss)
        self.log("mean_loss", self.mean_loss, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        loss = self.compute_loss(batch)
        self.log("val_loss", loss, sync_dist=True)
        self.scores.update(loss)
        return self.net(batch[0])

    def on_validation_epoch_end(self):
        scores = self.scores.compute()
        self.log("val_mean", scores["MeanMetric"])
        self.log("val_cat", scores["CatMetric"].float().prod())
        self.scores.reset()

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Transformer(nn.Module):
    """One encoder layer over the rows of an image, with dropout."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(8, 16)
        self.encode = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.2, batch_first=True)
        self.head = nn.Linear(16, 10)

    def forward(self, images):
        return self.head(self.encode(self.embed(images.view(-1, 8, 8))).mean(1))


class Branches(nn.Module):
    """A head that only some micro-batches use, and one that none uses."""

    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(64, 10) for _ in range(3))

    def forward(self, images):
        second = images.sum() % 2 > 1
        return self.heads[0](images) + (self.heads[1](images) if second else 0)


def make_net(kind):
    """Return a new network, the same in every process."""
    torch.default_generator.manual_seed(7)  # unlike torch.manual_seed, numbers no fit
    nets = {
        "mlp": lambda: nn.Sequential(
            nn.Linear(64, 32), nn.Tanh(), nn.Dropout(0.3), nn.Linear(32, 10)
        ),
        "plain": lambda: nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10)),
        "cnn": lambda: nn.Sequential(
            nn.Unflatten(1, (1, 8, 8)),
            nn.Conv2d(1, 6, 3),
            nn.BatchNorm2d(6),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(216, 10),
        ),
        "wide": lambda: nn.Sequential(
            nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 64, 3), nn.Flatten(), nn.Linear(2304, 10)
        ),
        "transformer": Transformer,
        "branches": Branches,
    }
    return nets[kind]()


def make_data(size, *, noisy=True):
    """Return digits, which draw noise unless they are not to."""
    if noisy:
        return NoisyDigits(size)
    digits = read_digits()
    images = torch.tensor(digits.data[:size], dtype=torch.float32) / 16
    return TensorDataset(images, torch.tensor(digits.target[:size]))


def fit(folder, net, ranks, **words):
    """Train as a run of its own would, and return the Trainer."""
    session.restart_fits()
    resumed = words.pop("resumed", None)
    loader = {"batch_size": BATCH_SIZE, "shuffle": True} | words.pop("loader", {})
    noisy = words.pop("noisy", True)
    size = words.pop("size", 6 * ranks + 4)
    loaders = DataLoader(make_data(size, noisy=noisy), **loader)
    if words.pop("several", False):  # the shorter loader starts again within an epoch
        loaders = {"long": loaders, "short": DataLoader(make_data(2 * ranks), **loader)}
    callback = DeterminismCallback(
        seed=5, ledger_dir=folder / str(PROCESSES), threads=words.pop("threads", None)
    )
    trainer = L.Trainer(
        max_epochs=words.pop("max_epochs", 2),
        strategy=words.pop("strategy", None) or DDPDeterministicStrategy(logical_ranks=ranks),
        devices=words.pop("devices", PROCESSES),
        callbacks=[callback, *words.pop("callbacks", [])],
        gradient_clip_val=0.5,
        num_sanity_val_steps=0,
        **QUIET | words,
    )
    trainer.fit(
        Classifier(make_net(net)),
        loaders,
        DataLoader(make_data(2 * ranks + 3, noisy=noisy), batch_size=2),
        ckpt_path=resumed,
    )
    return trainer


def add_from_left_to_right(start, stops, leaves):
    """Add each gradient of a process to the sum of those before."""
    return [0] + [1] * (len(stops) - 1)


def split_by_process(self):
    """Give each process its own part of the order, and split that among its logical ranks."""
    ranks = self._logical_ranks
    order = list(self.sampler)
    order = order[: len(order) // ranks * ranks]  # equally many batches for all processes
    process = self.block.start * PROCESSES // ranks
    part = order[process::PROCESSES]
    parts = [iter(self._batch(part[i :: len(self.block)])) for i in range(len(self.block))]
    for indices in zip(*parts, strict=False):
        yield MicroBatchIndices(indices, self.block.start)


def fit_controls(folder):
    """Train with one part of the strategy switched off in each; the bits then depend on P."""
    train = partial(fit, max_epochs=1)
    train(folder / "control", "plain", 4, noisy=False)
    with mock.patch.object(gradients, "count_merges", add_from_left_to_right):
        train(folder / "left to right", "plain", 4, noisy=False)
    large = {"noisy": False, "loader": {"batch_size": BATCH_SIZE * 4 // PROCESSES}, "size": 48}
    train(folder / "one batch", "plain", PROCESSES, **large)
    with mock.patch.object(steps.MicroBatchSeeds, "start"):
        train(folder / "process rng", "mlp", 4, noisy=False)
    with (
        mock.patch.object(sandbox._Record, "put_back"),
        mock.patch.object(sandbox._Change, "apply"),
    ):
        train(folder / "buffers", "cnn", 4)
    with mock.patch.object(loaders.BlockBatchSampler, "__iter__", split_by_process):
        train(folder / "sampler", "plain", 4, noisy=False, size=48)
    threads = 2 if PROCESSES == 1 else 1
    fit(folder / "threads", "wide", 4, threads=threads, loader={"batch_size": 16}, size=128)


class Steered(Classifier):
    """A classifier that also tests and predicts."""

    def test_step(self, batch, batch_idx, dataloader_idx=0):
        loss = self.compute_loss(batch)
        self.log("test_loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        draw = torch.rand(1)
        return self.net(batch[0]) + draw


class Noting(BasePredictionWriter):
    """Notes the batches of hooks, and the digest of each sample's prediction."""

    def __init__(self):
        super().__init__("batch")
        self.calls, self.predicted = [], {}

    def note(self, name, trainer, batch_idx, loader=0):
        self.calls.append([name, trainer.current_epoch, trainer.global_step, batch_idx, loader])

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.note("train", trainer, batch_idx)

    def on_validation_batch_end(self, trainer, module, outputs, batch, batch_idx, loader=0):
        self.note("validate", trainer, batch_idx, loader)

    def on_test_batch_end(self, trainer, module, outputs, batch, batch_idx, loader=0):
        self.note("test", trainer, batch_idx, loader)

    def write_on_batch_end(self, trainer, module, prediction, indices, batch, number, loader):
        for part, samples in zip(prediction, indices, strict=True):
            for row, sample in zip(part, samples, strict=True):
                assert self.predicted.setdefault(f"{loader} {sample}", digest_value(row))


def name_numbers(metrics):
    """Return logged values with their bits; those of a step alone are the process's own."""
    own = {"least_step", "mean_loss_step"}
    return {name: float(value).hex() for name, value in metrics.items() if name not in own}


def fit_steered(folder):
    """Train until a callback stops it; test and predict with what it leaves."""
    stop = EarlyStopping("val_loss", patience=1, min_delta=0.3)
    kept = folder / f"kept-{PROCESSES}"
    best = ModelCheckpoint(kept, "{epoch}-{val_loss:.9f}", monitor="val_loss")
    noting, average = Noting(), EMAWeightAveraging(decay=0.8, update_every_n_steps=2)
    words = {"max_epochs": 8, "enable_checkpointing": True}
    with mock.patch.object(sys.modules[__name__], "Classifier", Steered):
        trainer = fit(folder, "cnn", 5, callbacks=[average, stop, best, noting], **words)
    checkpoint = torch.load(best.best_model_path, weights_only=True)
    found = {
        "stopped": [stop.stopped_epoch, trainer.global_step],
        "best": [Path(best.best_model_path).name, float(best.best_model_score).hex()],
        "saved": digest_value([checkpoint["state_dict"], checkpoint["optimizer_states"]]),
        "fit": name_numbers(trainer.callback_metrics),
    }
    loaders = [DataLoader(make_data(size), batch_size=2) for size in (23, 11)]
    trainer.test(trainer.lightning_module, loaders)
    found |= {"test": name_numbers(trainer.callback_metrics), "calls": noting.calls}
    trainer.predict(trainer.lightning_module, loaders)
    return found | {"predicted": noting.predicted}


def fit_averaged(folder):
    """Train with averaged weights; return them, and the batches of the last epoch."""
    average = StochasticWeightAveraging(0.01, 2, annealing_epochs=2)
    trainer = fit(folder, "cnn", 5, max_epochs=4, callbacks=[average])
    state = trainer.lightning_module.state_dict()
    return [digest_value(state), int(state["net.2.num_batches_tracked"])]


class Saving(L.Callback):
    """Saves checkpoints between two epochs, within one, and at the end of one."""

    def __init__(self, folder):
        self.folder = folder

    def save(self, trainer, name):
        trainer.save_checkpoint(self.folder / f"{name}-{PROCESSES}.ckpt")

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.current_epoch == 1:
            self.save(trainer, f"batch{batch_idx}")

    def on_train_epoch_end(self, trainer, module):
        if trainer.current_epoch == 0:
            self.save(trainer, "epoch")


class Killing(L.Callback):
    """Kills the last rank in the second epoch."""

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        last = trainer.global_rank == trainer.world_size - 1
        if trainer.current_epoch == 1 and batch_idx == 2 and last:
            os.kill(os.getpid(), signal.SIGKILL)


def fit_interrupted(folder, what):
    """Train in one of the ways that the usage names."""
    words = {"max_epochs": 3, "accumulate_grad_batches": 2}
    if what in ("straight", "killed"):
        words["callbacks"] = [Saving(folder), *[Killing()] * (what == "killed")]
    else:
        words["resumed"] = folder / f"{what}.ckpt"
    fit(folder / what, "cnn", 4, **words)


def main():
    """Train in the given ways, or with all numbers of logical ranks."""
    folder, whats = Path(sys.argv[1]), sys.argv[2:]
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    for what in whats:
        fit_interrupted(folder, what)
    if whats:
        return
    for name, make_words in TRAININGS.items():
        net, ranks = name.split()
        if LARGE.get(PROCESSES, name) == name:
            fit(folder / name, net, int(ranks), **make_words())
    if PROCESSES in LARGE:
        return
    found = fit_steered(folder / "steered") | {"swa": fit_averaged(folder / "swa")}
    rank = os.environ.get("RANK", "0")
    (folder / f"found-{PROCESSES}-{rank}.json").write_text(json.dumps(found))
    fit_controls(folder)


if __name__ == "__main__":
    main()
