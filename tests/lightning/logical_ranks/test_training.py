"""Trainings on 1, 2, 3 and 8 processes have the same ledgers with logical ranks.

They continue on another number of processes with the same bits.
"""

import json
import os
import re
import signal
from functools import partial
from pathlib import Path
from unittest import mock

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import (
    BasePredictionWriter,
    EarlyStopping,
    EMAWeightAveraging,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.plugins import MixedPrecision
from logical_trainings import BATCH_SIZE, PROCESSES, Classifier, fit, make_data
from rank_processes import call_on_ranks, read_records
from torch.utils.data import DataLoader

from lightning_d9m import compare, read_ledger
from lightning_d9m.engine.control.data.resumable_sampler import MicroBatchIndices
from lightning_d9m.engine.hashing.digest import digest_value
from lightning_d9m.engine.ledger.format.records import Digests, Evaluation
from lightning_d9m.integrations.strategies.steps import loaders, steps
from lightning_d9m.integrations.strategies.sums import gradients, sandbox

# The networks, the numbers of logical ranks with which each is trained, and ways in which users
# train.
TRAININGS = {
    "mlp 8": lambda: {"loader": {"num_workers": 1, "persistent_workers": True}},
    "cnn 4": dict,
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
        mock.patch.object(sandbox._Change, "put_back"),
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
    callbacks = [average, stop, best, noting]
    trainer = fit(folder, "cnn", 5, model=Steered, callbacks=callbacks, **words)
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
    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        last = trainer.global_rank == trainer.world_size - 1
        if trainer.current_epoch == 1 and batch_idx == 2 and last:
            os.kill(os.getpid(), signal.SIGKILL)


def fit_interrupted(folder, *whats):
    """Train "straight", "killed" (the last rank, in epoch 1), or from a checkpoint's name."""
    folder = Path(folder)
    for what in whats:
        words: dict = {"max_epochs": 3}
        if what in ("straight", "killed"):
            words["callbacks"] = [Saving(folder), *[Killing()] * (what == "killed")]
        else:
            words["resumed"] = folder / f"{what}.ckpt"
        fit(folder / what, "cnn", 4, **words)


def fit_all(folder):
    """Train with all numbers of logical ranks; return what callbacks found."""
    folder = Path(folder)
    for name, make_words in TRAININGS.items():
        net, ranks = name.split()
        if LARGE.get(PROCESSES, name) == name:
            fit(folder / name, net, int(ranks), **make_words())
    if PROCESSES in LARGE:
        return None
    found = fit_steered(folder / "steered") | {"swa": fit_averaged(folder / "swa")}
    fit_controls(folder)
    return found


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return the folder of all ledgers, and what each rank found, by number of processes."""
    path = tmp_path_factory.mktemp("trainings")
    return path, {count: call_on_ranks(fit_all, count, path) for count in (1, 2, *LARGE)}


@pytest.fixture(scope="module")
def folder(trained):
    """Return the folder with the ledgers of all trainings, by name and number of processes."""
    return trained[0]


def final_totals(folder, name):
    return [read_records(folder / name / str(count), Digests)[0][-1] for count in (1, 2)]


@pytest.mark.parametrize("name", TRAININGS)
def test_the_whole_ledger_is_the_same_on_every_number_of_processes(folder, name):
    runs = {int(run.name): run for run in (folder / name).iterdir()}
    assert sorted(runs) == [1, 2, *(count for count in LARGE if LARGE[count] == name)]
    expected = read_records(runs[1], Digests | Evaluation)[0]
    moments = [record.moment for record in expected if isinstance(record, Digests)]
    assert moments == ["initial", "epoch", "epoch", "final"]
    assert len(expected) == 6  # and two validations
    for count, run in runs.items():
        records = read_records(run, Digests | Evaluation)
        assert sorted(records) == list(range(count))
        for rank in records:
            assert records[rank] == expected, f"rank {rank} of {count}"
        assert compare(runs[1], run).equal


def test_the_controls_start_from_a_training_that_agrees(folder):
    one, two = final_totals(folder, "control")
    assert one == two


@pytest.mark.parametrize(
    "name", ["left to right", "one batch", "process rng", "sampler", "threads"]
)
def test_without_one_part_of_it_the_weights_differ(folder, name):
    one, two = final_totals(folder, name)
    assert one.totals["weights"] != two.totals["weights"]


def test_buffers_that_are_not_put_back_change_no_weight(folder):
    one, two = final_totals(folder, "buffers")
    assert one.totals["weights"] == two.totals["weights"]
    assert one.totals["buffers"] != two.totals["buffers"]
    assert one.scalars["val_loss"] != two.scalars["val_loss"]


@pytest.fixture(scope="module")
def found(trained):
    return {count: trained[1][count] for count in (1, 2)}


@pytest.mark.parametrize("key", ["stopped", "best", "saved", "fit", "test", "calls", "swa"])
def test_callbacks_find_the_same_on_every_rank(found, key):
    assert {json.dumps(rank[key]) for ranks in found.values() for rank in ranks} == {
        json.dumps(found[1][0][key])
    }


def test_callbacks_steer_the_training(found):
    steered = found[1][0]
    name, score = steered["best"]
    assert steered["stopped"] == [1, 6]
    assert name == f"epoch=1-val_loss={float.fromhex(score):.9f}.ckpt"
    assert {"loss", "loss_step", "val_loss", "val_cat"} <= steered["fit"].keys()
    assert [call for call in steered["calls"] if call[0] == "train"] == [
        ["train", epoch, 3 * epoch + batch + 1, batch, 0] for epoch in (0, 1) for batch in range(3)
    ]
    assert steered["swa"][1] == 3  # batches of its last epoch, which has no steps


def test_every_sample_is_predicted_once_and_alike(found):
    (alone,) = (rank["predicted"] for rank in found[1])
    assert len(alone) == len({*alone.values()}) == 23 + 11
    for ranks in found.values():
        assert sum(len(rank["predicted"]) for rank in ranks) == len(alone)
        assert {k: v for rank in ranks for k, v in rank["predicted"].items()} == alone


@pytest.mark.parametrize("training", ["steered", "swa"])
def test_the_ledgers_of_steered_trainings_agree(folder, training):
    runs = [folder / training / str(count) for count in (1, 2)]
    assert compare(*runs).equal


@pytest.fixture(scope="module")
def resumed(tmp_path_factory):
    """Return the folder with the ledgers of an uninterrupted run, and of resumed ones."""
    path = tmp_path_factory.mktemp("resumed")
    call_on_ranks(fit_interrupted, 2, path, "straight")
    call_on_ranks(fit_interrupted, 1, path, "straight", "batch2-2")
    call_on_ranks(fit_interrupted, 3, path, "epoch-2", "batch0-2", "batch2-2", "batch0-1")
    return path


@pytest.mark.parametrize(
    ("name", "before", "count"),
    [("batch2", 2, 1), ("batch0", 1, 3), ("epoch", 2, 3), ("batch0", 2, 3), ("batch2", 2, 3)],
)
def test_a_checkpoint_continues_on_another_number_of_processes(resumed, name, before, count):
    straight, again = resumed / f"straight/{before}", resumed / f"{name}-{before}" / str(count)
    expected = read_records(straight, Digests)[0]
    moments = ["initial", "epoch", "epoch", "epoch", "final"]
    assert [record.moment for record in expected] == moments
    assert read_records(again, Digests) == dict.fromkeys(range(count), expected)
    assert compare(straight, again).equal


def test_a_run_whose_process_is_killed_goes_on_with_fewer(resumed):
    statuses, outputs = call_on_ranks(fit_interrupted, 3, resumed, "killed", fails=True)
    assert statuses[-1] == -9
    assert 0 not in statuses
    words = r"Rank 2 \(process \d+\) was killed or exited"
    assert any(re.search(words, text) for text in outputs)
    assert re.search(words, read_ledger(resumed / "killed/3/fit-000").outcome(0).end.error)
    call_on_ranks(fit_interrupted, 2, resumed, "batch1-3")
    expected = read_records(resumed / "straight/2", Digests)[0][-1]
    again = read_records(resumed / "batch1-3/2", Digests)
    assert again[0][-1] == again[1][-1] == expected
