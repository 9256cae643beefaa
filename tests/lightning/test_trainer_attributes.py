"""Metrics of torchmetrics go on where they were: of every kind, or it is said that they cannot."""

from functools import partial

import lightning.pytorch as L
import pytest
import torch
from resuming import Fits, agree
from torch import nn
from torchmetrics import CatMetric, MinMaxMetric, SumMetric
from torchmetrics.classification import MulticlassAccuracy
from torchmetrics.wrappers import Running
from trainings import make_model

from lightning_d9m.lightning import trainer_attributes

pytestmark = pytest.mark.usefixtures("unseeded", "new_process")


@pytest.fixture
def fits(tmp_path, new_process):
    return Fits(tmp_path, new_process)


def step(self, batch, batch_idx):
    outputs = self.layers(batch[0])
    loss = nn.functional.cross_entropy(outputs, batch[1])
    self.metric(loss)
    self.log("measured", self.metric, on_step=True, on_epoch=True)
    return loss


def step_by_hand(self, batch, batch_idx):
    loss = nn.functional.cross_entropy(self.layers(batch[0]), batch[1])
    self.metric.update(loss)
    return loss


def log_by_hand(self):
    metric_state = self.metric.compute()
    parts = metric_state if isinstance(metric_state, dict) else {"measured": metric_state}
    self.log_dict({name: torch.as_tensor(part).float().sum() for name, part in parts.items()})


def reset_best(self):
    """Forget what the sanity check left, as templates do."""
    self.best.reset()


def validate(self, batch, batch_idx):
    self.measured(self.layers(batch[0]), batch[1])
    self.log("validated", self.measured)


def remember_best(self):
    self.best.update(self.measured.compute())
    self.log("best", self.best.compute())


def with_metric(make, **methods):
    model = make_model(**methods)
    model.metric = make()
    return model


def with_best():
    model = make_model(
        validation_step=validate,
        on_validation_epoch_end=remember_best,
        on_train_start=reset_best,
    )
    model.measured, model.best = MulticlassAccuracy(10), SumMetric()
    return model


BY_HAND = {"training_step": step_by_hand, "on_train_epoch_end": log_by_hand}
KINDS = {
    "a list": partial(with_metric, CatMetric, **BY_HAND),
    "extremes of another": partial(with_metric, lambda: MinMaxMetric(SumMetric()), **BY_HAND),
    "the last few batches": partial(
        with_metric, lambda: Running(SumMetric(), 4), training_step=step
    ),
    "one that is reset when training starts": with_best,
}


@pytest.mark.parametrize("model", KINDS.values(), ids=KINDS.keys())
def test_metrics_of_each_kind_go_on(fits, model):
    run = {"model": model, "max_epochs": 2}
    straight = fits.fit(**run)
    for place in ({"batch": 4}, {"hook": "on_train_epoch_end", "epoch": 0, "batch": 6}):
        fits.interrupt(**run, at=place)
        agree(straight, fits.resume(**run))


class Same(L.Callback):
    """A callback that may be there twice."""


def test_callbacks_are_named_by_their_class():
    same = [Same(), Same()]
    named = trainer_attributes.name_callbacks([same[0], L.Callback(), same[1]])
    assert list(named) == ["callbacks.Same", "callbacks.Callback", "callbacks.Same#1"]
