"""A training with logical ranks; with their number in each process, the ledgers are equal."""

import os
from pathlib import Path

import lightning as L
import torch
import trainings
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import CatMetric, MeanMetric, MetricCollection
from trainings import NoisyDigits, read_digits

from lightning_d9m import DDPDeterministicStrategy

PROCESSES = int(os.environ.get("WORLD_SIZE", "1"))
BATCH_SIZE = 3


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


def fit(folder, net, ranks, model=Classifier, **words):
    """Train as a run of its own would, and return the Trainer."""
    loader = {"batch_size": BATCH_SIZE, "shuffle": True} | words.pop("loader", {})
    noisy = words.pop("noisy", True)
    size = words.pop("size", 6 * ranks + 4)
    loaders = DataLoader(make_data(size, noisy=noisy), **loader)
    if words.pop("several", False):  # the shorter loader starts again within an epoch
        loaders = {"long": loaders, "short": DataLoader(make_data(2 * ranks), **loader)}
    strategy = words.pop("strategy", None) or DDPDeterministicStrategy(logical_ranks=ranks)
    return trainings.fit(
        model(make_net(net)),
        loaders,
        DataLoader(make_data(2 * ranks + 3, noisy=noisy), batch_size=2),
        folder=Path(folder, str(PROCESSES)),
        settings={"threads": words.pop("threads", None)},
        strategy=strategy,
        gradient_clip_val=0.5,
        **{"max_epochs": 2, "devices": PROCESSES} | words,
    )
