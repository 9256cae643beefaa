"""A run that keeps state of every kind is resumed exactly; what a checkpoint lacks is said."""

import os
import random
from functools import reduce
from operator import getitem

import lightning.pytorch as L
import numpy as np
import pytest
import torch
from resuming import Curriculum, DrawingCollate, DrawingDigits, Fits, OwnOrder
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics import CatMetric, MeanMetric, Metric, MetricCollection, SumMetric
from torchmetrics.classification import MulticlassAccuracy
from torchmetrics.wrappers import Running
from trainings import NoisyDigits, make_model

from lightning_d9m import D9mError
from lightning_d9m.control import session
from lightning_d9m.lightning.saved_state import FORMAT, KEY, MANIFEST_KEY


class DrawingCallback(L.Callback):
    """A callback with a generator and a metric of its own."""

    def __init__(self):
        self.rng = np.random.RandomState(13)
        self.sum = SumMetric()

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        drawn = 0.01 * self.rng.rand()
        self.sum.update(drawn)
        batch[0].add_(drawn)

    def on_train_epoch_end(self, trainer, module):
        module.log("drawn", self.sum.compute())


class Total(Metric):
    """Adds up numbers, or their sizes."""

    def __init__(self, *, sizes):
        super().__init__()
        self.sizes = sizes
        self.add_state("total", torch.tensor(0.0), dist_reduce_fx="sum")

    def update(self, number):
        self.total += abs(number) if self.sizes else number

    def compute(self):
        return self.total


def own_order():
    return DataLoader(DrawingDigits(), batch_sampler=OwnOrder(), collate_fn=DrawingCollate())


def drawing_step(self, batch, batch_idx):
    """Draw from every kind of generator, and measure in every way, as user code does."""
    noise = random.random() + float(np.random.rand()) + torch.rand(64) + self.own.random()
    noise = noise + torch.rand(64, generator=self.noise) + self.numpy.random() + self.legacy.rand()
    outputs = self.layers(batch[0] + 0.01 * noise)
    loss = torch.nn.functional.cross_entropy(outputs, batch[1])
    self.log("train_loss", loss, on_step=True, on_epoch=True)
    self.accuracy(outputs, batch[1])
    self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
    if batch_idx < 3:
        self.early(loss)
        self.log("early", self.early, on_step=False, on_epoch=True)
    self.whole.update(loss)
    self.listed.update(loss)
    self.last(loss)
    # Alike in the first batch, so that torchmetrics takes them for one ever after.
    self.pair.update(1.0 if self.global_step == 0 else -1.0)
    return loss


def log_measured(self):
    """Log what the module measures by itself: over the epoch, and over the whole training."""
    self.log("whole", self.whole.compute())
    self.log("listed", torch.as_tensor(self.listed.compute()).sum())
    self.log("last", self.last.compute())
    self.log_dict(self.pair.compute())
    self.log("seen", float(self.seen.compute()))
    self.pair.reset()


def measuring_validation(self, batch, batch_idx):
    outputs = self.layers(batch[0])
    self.seen.update(1)
    self.validated(outputs, batch[1])
    self.log("validated", self.validated)
    loss = torch.nn.functional.cross_entropy(outputs, batch[1])
    self.log("val_loss", loss)
    if self.trainer.fit_loop.epoch_loop.batch_idx == 2:
        self.log("earlier_loss", loss)


def make_drawing_model():
    model = make_model(
        training_step=drawing_step,
        validation_step=measuring_validation,
        on_train_epoch_end=log_measured,
    )
    model.own = random.Random(6)
    model.noise = torch.Generator().manual_seed(3)
    model.numpy = np.random.default_rng(4)
    model.legacy = np.random.RandomState(5)
    model.accuracy, model.validated = MulticlassAccuracy(10), MulticlassAccuracy(10)
    model.early, model.whole, model.seen = MeanMetric(), SumMetric(), SumMetric()
    model.listed, model.last = CatMetric(), Running(SumMetric(), 4)
    model.pair = MetricCollection({"numbers": Total(sizes=False), "sizes": Total(sizes=True)})
    return model


RUN = {
    "loader": own_order,
    "model": make_drawing_model,
    "callbacks": lambda: [DrawingCallback()],
    "validate": lambda: DataLoader(DrawingDigits(), batch_size=16),
    "accumulate_grad_batches": 2,
    "val_check_interval": 3,
    "max_epochs": 2,
}
STATE = ("callbacks", KEY)
RANK = (*STATE, "ranks", 0)
# The path of a piece of a checkpoint, what takes its place, and what is then said.
REFUSED = [
    (STATE, None, "has no lightning_d9m state"),
    (STATE, lambda _: [1], "has no lightning_d9m state"),
    ((*STATE, "format"), lambda n: 2, f"has format 2; this version reads {FORMAT}"),
    ((*STATE, "settings", "seed"), lambda n: 4, "saved with seed=4; now it is 3"),
    ((*STATE, "world_size"), lambda n: 2, "saved with world_size=2; now it is 1"),
    ((*STATE, "position", "step"), lambda n: n - 1, "at step 5, .* was saved at step 4"),
    ((*RANK, "generators", "train.0.dataset.rng"), None, r"only in this run: train\.0\.d.*\.rng"),
    ((*RANK, "inexact"), lambda old: ["A reason."], "- A reason."),
    (
        (*RANK, "rng"),
        None,
        r"state of the checkpoint is damaged: Object missing required field `rng` - at `\$.ranks",
    ),
    ((*STATE, "more"), lambda _: 1, "is damaged: Object contains unknown field `more`"),
    ((*STATE, "position"), lambda _: [], r"is damaged: Expected `object`.* at `\$.position`"),
    ((*RANK, "ledger", "check"), lambda _: 1, "is damaged: Expected `str`, got `int`"),
]


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    """Train, save in the middle of an epoch, between two micro-batches, and resume exactly."""
    fits = Fits(tmp_path_factory.mktemp("pieces"), lambda: setattr(session, "_fits", 0))
    fits.check({"batch": 5}, **RUN)
    return fits


@pytest.mark.filterwarnings("ignore:The ``compute`` method of metric:UserWarning")
@pytest.mark.parametrize(("path", "value", "message"), REFUSED)
def test_what_cannot_be_exact_is_said(interrupted, path, value, message):
    checkpoint = torch.load(interrupted.folder / "0.ckpt", weights_only=True)
    del checkpoint["callbacks"][KEY][MANIFEST_KEY]  # which would tell at once
    *above, last = path
    place = reduce(getitem, above, checkpoint)
    if value is None:
        del place[last]
    else:
        place[last] = value(place.get(last))
    torch.save(checkpoint, interrupted.folder / "edited.ckpt")
    with pytest.raises(D9mError, match=message):
        interrupted.fit(**RUN, resume=interrupted.folder / "edited.ckpt")


class Stages(L.LightningDataModule):
    """Gives other data in every second epoch."""

    def train_dataloader(self):
        return DataLoader(self.make_data(), batch_size=16, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.make_data(), batch_size=16)

    def make_data(self):
        return NoisyDigits(96 + 16 * (self.trainer.current_epoch // 2))


def make_persistent_model():
    """Return a model whose metrics Lightning saves in the weights: as they were, not reset yet."""
    model = make_drawing_model()
    model.accuracy.persistent(mode=True)
    return model


def make_logging_model():
    """Return a model that logs a mean and a metric over the epoch."""

    def training_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self.layers(batch[0]), batch[1])
        self.log("mean_loss", loss, on_step=False, on_epoch=True)
        self.average.update(loss)
        self.log("average", self.average, on_step=False, on_epoch=True)
        return loss

    model = make_model(training_step=training_step)
    model.average = MeanMetric()
    return model


@pytest.fixture
def logical(monkeypatch):
    """Return the words of a fit with two logical ranks in this process."""
    monkeypatch.setenv("LIGHTNING_D9M_LOGICAL_RANKS", "2")
    before = dict(os.environ)
    words = {"model": make_logging_model, "strategy": "ddp_d9m", "devices": 1}
    yield words | {"accumulate_grad_batches": 2}
    for name in os.environ.keys() - before:  # Lightning's launcher sets the address of the group
        del os.environ[name]
    torch.distributed.destroy_process_group()


HOOKS = ("on_validation_batch_end", "on_validation_end")
BETWEEN = {"hook": "on_train_epoch_end", "epoch": 0, "batch": 6}
RELOADED = {"datamodule": Stages, "reload_dataloaders_every_n_epochs": 2}
VALIDATED = {"validate": lambda: DataLoader(DrawingDigits(), batch_sampler=Curriculum())}
PLACES = {
    "the epoch in which data were loaded": ([{"epoch": 1}], RELOADED),
    "the last loss of an epoch": ([{"batch": 6}], {"max_epochs": 2}),
    "metrics that the weights have": ([BETWEEN], RUN | {"model": make_persistent_model}),
    "a validation": ([{"hook": hook, "batch": 3, "epoch": 0} for hook in HOOKS], RUN | VALIDATED),
}


@pytest.mark.parametrize(("places", "words"), PLACES.values(), ids=PLACES)
def test_a_run_is_resumed_where_a_piece_matters(fits, places, words):
    fits.check(*places, **words)


def test_what_logical_ranks_have_kept_is_restored_within_an_epoch(fits, logical):
    fits.check({"batch": 1}, **logical)
