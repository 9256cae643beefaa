"""Steps that are run twice: faults are named, and the training is the one without it."""

import json

import numpy as np
import pytest
import torch
from ledger_runs import list_batches
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torchmetrics import MeanMetric
from trainings import make_model

from lightning_d9m.errors import DriftError, SettingError
from lightning_d9m.ledger.format.records import Batch


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


@pytest.mark.parametrize("words", [{}, {"trainer_accumulate_grad_batches": 3}, {"probes": "all"}])
def test_training_is_bit_identical_to_one_without_it(fit, words):
    plain_model, model = busy_model(), busy_model()
    plain = fit(model=plain_model, trainer_gradient_clip_val=0.5, **words)
    replayed = fit(model=model, trainer_gradient_clip_val=0.5, replay_every=1, **words)
    assert final(replayed) == final(plain)
    assert plain_model.seen == model.seen
    assert plain_model.count == model.count
    assert plain_model.array.tolist() == model.array.tolist()
    assert torch.equal(plain_model.scale, model.scale)
    lines = [ledger.files[0].read_text().splitlines()[2:] for ledger in (plain, replayed)]
    records = [[json.loads(line) | {"check": ""} for line in part] for part in lines]
    records = [[own for own in part if own["kind"] != "probes"] for part in records]
    assert records[0] == records[1]
    assert list_batches(plain) == list_batches(replayed)
    assert replayed.header.settings["replay_every"] == 1


def test_a_scaled_loss_is_no_false_alarm(fit):
    """With a GradScaler the loss is scaled between the place that is compared and the gradient."""

    def precision():
        scaler = torch.amp.GradScaler("cpu")
        return MixedPrecision("16-mixed", "cpu", scaler)

    plain = fit(trainer_plugins=[precision()])
    assert final(fit(trainer_plugins=[precision()], replay_every=1)) == final(plain)


def test_only_every_nth_batch_is_run_twice(fit):
    calls = []

    def step(self, batch, batch_idx):
        calls.append(batch_idx)
        return self.layers(batch[0]).sum()

    fit(model=make_model(training_step=step), replay_every=4, trainer_max_epochs=1)
    assert calls == [0, 0, 1, 2, 3, 4, 4, 5]


class FlipsOnce:
    """A hook that flips the lowest bit of one element of an output, in one call."""

    def __init__(self, call):
        self.calls_left = call

    def __call__(self, module, args, output):
        self.calls_left -= 1
        if self.calls_left == 0:
            flipped = output.detach().clone()
            flipped.view(torch.int32)[3, 1] ^= 1
            return output + (flipped - output.detach())
        return None


def test_a_skipped_batch_leaves_no_step_wrapped(fit):
    """Lightning calls no hook at the end of a batch that ``on_train_batch_start`` skips."""
    ledgers, runs = [], []

    def step(self, batch, _):
        runs[-1] += 1
        images, classes = batch
        return nn.functional.cross_entropy(self.layers(images), classes)

    def skip(self, _, batch_idx):
        return -1 if batch_idx == 1 else None

    for words in ({}, {"replay_every": 1}):
        runs.append(0)
        model = make_model(training_step=step, on_train_batch_start=skip)
        ledgers.append(fit(model=model, **words))
        assert "training_step" not in vars(model)
    assert runs[1] == 2 * runs[0]
    assert final(ledgers[0]) == final(ledgers[1])


def test_a_bit_flipped_once_in_an_activation_is_named(fit):
    model = make_model()
    # The 5th call is in the first run of the 3rd batch; the first validation makes two.
    model.layers[0].register_forward_hook(FlipsOnce(2 + 5))
    with pytest.raises(DriftError, match="run twice") as caught:
        fit(model=model, replay_every=1)
    error = caught.value
    assert (error.moment, error.step, error.group, error.names) == (
        "replay",
        2,
        "output",
        ("layers.0",),
    )
    assert error.expected != error.actual
    assert error.count < error.total


def test_a_bit_flipped_once_in_a_gradient_is_named(fit):
    model = make_model()
    left = [4]

    def flip(gradient):
        left[0] -= 1
        if left[0] == 0:
            flipped = gradient.clone()
            flipped.view(torch.int32)[0, 0] ^= 1
            return flipped
        return None

    model.layers[4].weight.register_hook(flip)
    with pytest.raises(DriftError) as caught:
        fit(model=model, replay_every=1)
    error = caught.value
    assert (error.step, error.group, error.names) == (1, "local_gradient", ("layers.4.weight",))
    assert error.count == 1


def test_a_warning_lets_the_training_go_on_and_the_ledger_has_the_record(fit):
    model = make_model()
    model.layers[0].register_forward_hook(FlipsOnce(2 + 5))
    with pytest.warns(UserWarning, match="output of 'layers.0'"):
        ledger = fit(model=model, replay_every=1, on_drift="warn", probes=["loss"])
    records = [json.loads(line) for line in ledger.files[0].read_text().splitlines()]
    found = [
        step
        for entry in ledger.records(0)
        for step in (
            [entry.step]
            if isinstance(entry, Batch)
            else ["replay"] * (entry.as_record()["kind"] == "replay")
        )
    ]
    assert found == [0, 1, "replay", *range(2, len(found) - 1)]
    (found,) = [record for record in records if record["kind"] == "replay"]
    assert (found["step"], found["place"]) == (2, ["output", "layers.0", 0])


def test_manual_optimization_is_refused(fit):
    model = make_model(training_step=lambda self, batch, batch_idx: None)
    model.automatic_optimization = False
    with pytest.raises(SettingError, match="optimizes by hand"):
        fit(model=model, replay_every=1)


@pytest.mark.filterwarnings("ignore:.*`dataloader_iter`")
def test_a_step_that_takes_the_iterator_is_refused(fit):
    def step(self, dataloader_iter):
        batch, _, _ = next(dataloader_iter)
        return self.layers(batch[0]).sum()

    with pytest.raises(SettingError, match="takes the iterator"):
        fit(model=make_model(training_step=step), replay_every=1)


def test_a_step_that_writes_to_weights_is_refused(fit):
    """A momentum target: its weights would move twice, whoever counts their versions or not."""

    def step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self.layers(batch[0]), batch[1])
        self.target.data = 0.9 * self.target.data + 0.1 * self.layers[0].weight.data
        return loss

    model = make_model(training_step=step)
    model.target = nn.Parameter(model.layers[0].weight.detach().clone(), requires_grad=False)
    with pytest.raises(SettingError, match="'target' changes within a training step"):
        fit(model=model, replay_every=1)


def test_a_step_that_fails_the_second_time_leaves_everything_restored(fit):
    calls = []

    def step(self, batch, batch_idx):
        calls.append(batch_idx)
        if len(calls) == 2:
            raise RuntimeError("only once")
        return self.layers(batch[0]).sum()

    model = make_model(training_step=step)
    with pytest.raises(RuntimeError, match="only once"):
        fit(model=model, replay_every=1)
    assert not {"training_step", "log", "log_dict"} & set(vars(model))
