"""Steps that are run twice: faults are named, and the training is the one without it."""

import json
import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from ledger_runs import list_batches
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import FSDPStrategy
from torch import nn
from torchmetrics import MeanMetric
from trainings import make_model

from lightning_d9m.engine.ledger.format.records import Batch, ReplayDrift
from lightning_d9m.errors import DriftError, SettingError
from lightning_d9m.integrations.lightning.step_replay import Replay


@pytest.fixture(autouse=True)
def no_calls_left(monkeypatch):
    monkeypatch.setenv("CALLS_LEFT", "0")


def final(ledger):
    return ledger.outcome(0).final


def busy_model(**overrides):
    """Return a model whose step changes whatever a step may change."""

    def step(self, batch, batch_idx):
        images, classes = batch
        images.mul_(1.5)
        logits = self.layers(images) * self.scale
        loss = nn.functional.cross_entropy(logits, classes)
        self.seen.append(float(loss.detach()))
        self.count += len(images)
        self.scale = self.scale * 0.99
        self.array += 1
        self.table["last"] = logits.detach()
        self.mean.update(loss.detach())
        self.ema.mul_(0.9).add_(loss.detach(), alpha=0.1)
        self.log("train_loss", loss)
        self.log("mean", self.mean, on_epoch=True, on_step=False)
        return {"loss": loss, "extra": 1}

    model = make_model(**({"training_step": step} | overrides))
    model.seen, model.count, model.scale = [], 0, torch.ones(())
    model.array, model.table, model.mean = np.zeros(2), {}, MeanMetric()
    model.register_buffer("ema", torch.zeros(()))
    return model


def scaled():
    """The loss is scaled between the place that is compared and the gradient."""
    return {"trainer_plugins": [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))]}


def accumulated():
    return {"trainer_accumulate_grad_batches": 3, "probes": "all"}


@pytest.mark.parametrize("make_words", [accumulated, scaled])
def test_training_is_bit_identical_to_one_without_it(fit, make_words):
    models, ledgers = [busy_model(), busy_model()], []
    for model, every in zip(models, (0, 1), strict=True):
        words = {"trainer_gradient_clip_val": 0.5, "replay_every": every, **make_words()}
        ledgers.append(fit(model=model, **words))
    plain, replayed = ledgers
    assert final(replayed) == final(plain)
    left = [(own.seen, own.count, own.array.tolist(), own.scale.item()) for own in models]
    assert left[0] == left[1]
    lines = [ledger.files[0].read_text().splitlines()[2:] for ledger in ledgers]
    records = [[json.loads(line) | {"check": ""} for line in part] for part in lines]
    records = [[own for own in part if own["kind"] != "probes"] for part in records]
    assert records[0] == records[1]
    assert list_batches(plain) == list_batches(replayed)
    assert replayed.header.settings["replay_every"] == 1


def test_only_every_nth_batch_is_run_twice_and_a_skipped_one_leaves_no_step_wrapped(fit, tmp_path):
    """Lightning calls no hook at the end of a batch that ``on_train_batch_start`` skips."""
    ledgers, kept, calls = [], [], tmp_path / "calls"

    def step(self, batch, batch_idx):
        kept.append(batch_idx)  # what a function holds is put back, and a file is not
        with calls.open("a") as file:
            file.write(str(batch_idx))
        return nn.functional.cross_entropy(self.layers(batch[0]), batch[1])

    def skip(self, _, batch_idx):
        return -1 if batch_idx == 4 else None

    for every in (0, 2):
        kept.clear()
        calls.write_text("")
        model = make_model(training_step=step, on_train_batch_start=skip)
        ledgers.append(fit(model=model, replay_every=every, trainer_max_epochs=1))
        assert calls.read_text() == ("001223" if every else "0123")
        assert kept == [0, 1, 2, 3]
        assert "training_step" not in vars(model)
    assert final(ledgers[0]) == final(ledgers[1])


class FlipsOnce:
    """A hook that flips the lowest bit of one element of an output, in one call.

    It counts outside of the program's state, which is restored before a step runs again.
    """

    def __init__(self, call):
        os.environ["CALLS_LEFT"] = str(call)

    def __call__(self, module, args, output):
        left = int(os.environ["CALLS_LEFT"]) - 1
        os.environ["CALLS_LEFT"] = str(left)
        if left == 0:
            flipped = output.detach().clone()
            flipped.view(torch.int32)[3, 1] ^= 1
            return output + (flipped - output.detach())
        return None


def with_activation(model):
    # The 5th call is in the first run of the 3rd batch; the first validation makes two.
    model.layers[0].register_forward_hook(FlipsOnce(2 + 5))


def with_gradient(model):
    flips = FlipsOnce(4)
    model.layers[4].weight.register_hook(lambda gradient: flips(None, None, gradient))


@pytest.mark.parametrize(
    ("plant", "step", "group", "name"),
    [
        (with_activation, 2, "output", "layers.0"),
        (with_gradient, 1, "local_gradient", "layers.4.weight"),
    ],
)
def test_a_bit_flipped_once_is_named(fit, plant, step, group, name):
    model = make_model()
    plant(model)
    with pytest.raises(DriftError, match="run twice") as caught:
        fit(model=model, replay_every=1)
    error = caught.value
    assert (error.moment, error.step, error.group, error.names) == ("replay", step, group, (name,))
    assert error.expected != error.actual
    assert 1 <= error.count < error.total


def test_a_warning_lets_the_training_go_on_and_the_ledger_has_the_record(fit):
    model = make_model()
    with_activation(model)
    with pytest.warns(UserWarning, match="output of 'layers.0'"):
        ledger = fit(model=model, replay_every=1, on_drift="warn", probes=["loss"])
    lines = [json.loads(line) for line in ledger.files[0].read_text().splitlines()]
    records = [line for line in lines if line["kind"] == "replay"]
    assert [(found["step"], found["place"]) for found in records] == [
        (2, ["output", "layers.0", 0])
    ]
    order = [
        record.step if isinstance(record, Batch) else "replay"
        for record in ledger.records(0)
        if isinstance(record, Batch | ReplayDrift)
    ]
    assert order == [0, 1, "replay", *range(2, 12)]


def take_iterator(self, dataloader_iter):
    batch, _, _ = next(dataloader_iter)
    return self.layers(batch[0]).sum()


def move_target(self, batch, batch_idx):
    """A momentum target: its weights would move twice, whoever counts their versions or not."""
    loss = nn.functional.cross_entropy(self.layers(batch[0]), batch[1])
    self.target.data = 0.9 * self.target.data + 0.1 * self.layers[0].weight.data
    return loss


@pytest.mark.filterwarnings("ignore:.*`dataloader_iter`")
@pytest.mark.parametrize(
    ("step", "automatic", "message"),
    [
        (lambda self, batch, batch_idx: None, False, "optimizes by hand"),
        (take_iterator, True, "takes the iterator"),
        (move_target, True, "'target' changes within a training step"),
    ],
)
def test_a_step_that_cannot_be_run_twice_is_refused(fit, step, automatic, message):
    model = make_model(training_step=step)
    model.automatic_optimization = automatic
    model.target = nn.Parameter(model.layers[0].weight.detach().clone(), requires_grad=False)
    with pytest.raises(SettingError, match=message):
        fit(model=model, replay_every=1)


def test_a_strategy_that_shards_is_not_replayed():
    class OwnStrategy(FSDPStrategy):
        """A user's."""

    model = SimpleNamespace(automatic_optimization=True)
    trainer = SimpleNamespace(strategy=object.__new__(OwnStrategy), lightning_module=model)
    with pytest.raises(SettingError, match="strategy is OwnStrategy, which divides the weights"):
        Replay(trainer, None)
