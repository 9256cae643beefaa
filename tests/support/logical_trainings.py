"""One rank of trainings with logical ranks; see lightning/logical_ranks/test_training.py."""

import json
import logging
import os
import sys
import warnings
from functools import partial
from pathlib import Path
from unittest import mock

import lightning as L
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import CatMetric, MeanMetric, MetricCollection
from trainings import QUIET, NoisyDigits, read_digits

from lightning_d9m import DDPDeterministicStrategy, DeterminismCallback
from lightning_d9m.control import session
from lightning_d9m.control.data.resumable_sampler import MicroBatchIndices
from lightning_d9m.lightning.logical_ranks import steps
from lightning_d9m.lightning.logical_ranks.logged_values import LoggedValues
from lightning_d9m.logical_ranks import batches, gradients, sandbox

PROCESSES = int(os.environ.get("WORLD_SIZE", "1"))
BATCH_SIZE = 3
# The networks, the numbers of logical ranks with which each is trained, and ways in which users
# train.
TRAININGS = {
    "mlp 2": dict,
    "mlp 8": lambda: {"loader": {"num_workers": 1, "persistent_workers": True}},
    "cnn 4": lambda: {"accumulate_grad_batches": 2},
    "cnn 5": lambda: {"loader": {"drop_last": True}},
    "transformer 6": dict,
    "branches 4": lambda: {"several": True},
    "plain 4": lambda: {
        "plugins": MixedPrecision(
            "16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**60, growth_interval=2)
        )
    },
}


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
    torch.manual_seed(7)
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
    session._fits = 0
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


def add_from_left_to_right(block, leaves):
    """Add each gradient of a process to the sum of those before."""
    return [0] + [1] * (len(block) - 1)


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


add_all = LoggedValues.add


def add_first(self, parts, **words):
    """Add what process 0 has logged, as without ``sync_dist``."""
    add_all(self, parts[:1], **words)


def fit_controls(folder):
    """Train with one part of the strategy switched off in each; the bits then depend on P."""
    train = partial(fit, max_epochs=1)
    train(folder / "control", "plain", 4, noisy=False)
    with mock.patch.object(gradients, "count_merges", add_from_left_to_right):
        train(folder / "left to right", "plain", 4, noisy=False)
    large = {"noisy": False, "loader": {"batch_size": BATCH_SIZE * 4 // PROCESSES}, "size": 48}
    train(folder / "one batch", "plain", PROCESSES, **large)
    train(folder / "ddp", "plain", PROCESSES, **large, strategy="ddp")
    with mock.patch.object(steps.MicroBatchSeeds, "start"):
        train(folder / "process rng", "mlp", 4, noisy=False)
    with (
        mock.patch.object(sandbox._Record, "put_back"),
        mock.patch.object(sandbox._Change, "apply"),
    ):
        train(folder / "buffers", "cnn", 4)
    with mock.patch.object(LoggedValues, "add", add_first):
        train(folder / "values", "plain", 4, noisy=False)
    with mock.patch.object(batches.BlockBatchSampler, "__iter__", split_by_process):
        train(folder / "sampler", "plain", 4, noisy=False, size=48)
    threads = 2 if PROCESSES == 1 else 1
    fit(folder / "threads", "wide", 4, threads=threads, loader={"batch_size": 16}, size=128)


def main():
    """Train with all numbers of logical ranks."""
    folder = Path(sys.argv[1])
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    for name, make_words in TRAININGS.items():
        net, ranks = name.split()
        if PROCESSES < 3 or name in ("mlp 8", "transformer 6")[: 9 - PROCESSES]:
            fit(folder / name, net, int(ranks), **make_words())
    if PROCESSES < 3:
        import logical_callbacks

        found = logical_callbacks.fit_all(folder)
        (folder / f"found-{PROCESSES}-{found['rank']}.json").write_text(json.dumps(found))
        fit_controls(folder)


if __name__ == "__main__":
    main()
