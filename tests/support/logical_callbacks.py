"""One rank of trainings whose callbacks steer them; see lightning/logical_ranks/test_callbacks.py.

Usage: logical_callbacks.py FOLDER
"""

import json
import logging
import os
import sys
import warnings
from pathlib import Path
from unittest import mock

import lightning as L
import logical_trainings
import numpy as np
import torch
from lightning.pytorch.callbacks import (
    BasePredictionWriter,
    EarlyStopping,
    EMAWeightAveraging,
    ModelCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from logical_trainings import PROCESSES, Classifier, make_data, make_net
from torch.utils.data import DataLoader
from trainings import QUIET

from lightning_d9m import DDPDeterministicStrategy, DeterminismCallback
from lightning_d9m.control import session
from lightning_d9m.hashing.digest import digest_value
from lightning_d9m.logical_ranks import scalars

LOGICAL_RANKS = 5


class Steered(Classifier):
    """A classifier that also tests and predicts."""

    def test_step(self, batch, batch_idx, dataloader_idx=0):
        loss = self.compute_loss(batch)
        self.log("test_loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        draw = torch.rand(1)
        return self.net(batch[0]) + draw


class Noting(L.Callback):
    """Notes which hooks run, on which batch and after how many steps."""

    def __init__(self):
        self.calls = []

    def note(self, name, trainer, batch_idx, *rest):
        self.calls.append([name, trainer.current_epoch, trainer.global_step, batch_idx, *rest])

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.note("train start", trainer, batch_idx)

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.note("train end", trainer, batch_idx)

    def on_validation_batch_end(self, trainer, module, outputs, batch, batch_idx, loader=0):
        self.note("validate", trainer, batch_idx, loader)

    def on_test_batch_end(self, trainer, module, outputs, batch, batch_idx, loader=0):
        self.note("test", trainer, batch_idx, loader)

    def on_predict_batch_end(self, trainer, module, outputs, batch, batch_idx, loader=0):
        self.note("predict", trainer, batch_idx, loader)


class Writing(BasePredictionWriter):
    """Keeps the predictions of each batch, and the indices of its samples."""

    def __init__(self):
        super().__init__("batch_and_epoch")
        self.batches = []
        self.epoch = None

    def write_on_batch_end(self, trainer, module, prediction, indices, batch, number, loader):
        self.batches.append([number, loader, indices, [digest_value(one) for one in prediction]])

    def write_on_epoch_end(self, trainer, module, predictions, batch_indices):
        self.epoch = batch_indices


def name_numbers(metrics):
    """Return logged values with their bits."""
    return {name: float(value).hex() for name, value in metrics.items()}


def fit_steered(folder, name, net="cnn", **words):
    """Train until a callback stops it; test and predict with what it leaves."""
    session._fits = 0
    stop = EarlyStopping("val_loss", patience=1, min_delta=0.3)
    best = ModelCheckpoint(
        folder / name / f"kept-{PROCESSES}", "{epoch}-{val_loss:.9f}", monitor="val_loss"
    )
    noting, writing = Noting(), Writing()
    trainer = L.Trainer(
        max_epochs=8,
        strategy=DDPDeterministicStrategy(logical_ranks=LOGICAL_RANKS),
        devices=PROCESSES,
        callbacks=[
            DeterminismCallback(seed=5, ledger_dir=folder / name / str(PROCESSES)),
            EMAWeightAveraging(decay=0.8, update_every_n_steps=2),
            stop,
            best,
            noting,
            writing,
        ],
        **QUIET | {"enable_checkpointing": True},
    )
    model = Steered(make_net(net))
    loader = DataLoader(make_data(34), batch_size=3, shuffle=True)
    trainer.fit(model, loader, DataLoader(make_data(23), batch_size=2))
    found = {
        "stopped": [stop.stopped_epoch, trainer.global_step],
        "best": [Path(best.best_model_path).name, float(best.best_model_score).hex()],
        "fit": name_numbers(trainer.callback_metrics),
    }
    checkpoint = torch.load(best.best_model_path, weights_only=True)
    found["weights"] = digest_value(checkpoint["state_dict"])
    found["optimizer"] = digest_value(checkpoint["optimizer_states"])
    loaders = [DataLoader(make_data(size), batch_size=2) for size in (23, 11)]
    trainer.test(model, loaders)
    found["test"] = name_numbers(trainer.callback_metrics)
    predictions = trainer.predict(model, loaders)
    found["predictions"] = [
        [[digest_value(one) for one in batch] for batch in part] for part in predictions
    ]
    found |= {"calls": noting.calls, "written": writing.batches, "indices": writing.epoch}
    return found


def add_rounded(self, number):
    """Add a number in float32, as a process that sums what it has logged does."""
    self.partials = [float(np.float32(sum(self.partials) + number))]


def fit_averaged(folder):
    """Train with stochastic weight averaging, which counts statistics of batches at its end."""
    trainer = logical_trainings.fit(
        folder / "swa",
        "cnn",
        LOGICAL_RANKS,
        max_epochs=4,
        callbacks=[StochasticWeightAveraging(0.01, 2, annealing_epochs=2)],
    )
    state = trainer.lightning_module.state_dict()
    return {
        "state": digest_value(state),
        "counted": int(state["net.2.num_batches_tracked"]),
        "steps": trainer.global_step,
    }


class Averaging(WeightAveraging):
    """The mean of the weights of all steps, which replaces the weights at the end."""

    def on_train_end(self, trainer, module):
        self.trained = digest_value(module.state_dict())
        super().on_train_end(trainer, module)


def fit_mean(folder):
    """Train with the mean of the weights."""
    averaging = Averaging()
    trainer = logical_trainings.fit(folder / "mean", "cnn", LOGICAL_RANKS, callbacks=[averaging])
    return [averaging.trained, digest_value(trainer.lightning_module.state_dict())]


def main():
    """Train in each of the ways, and write what each rank found."""
    folder = Path(sys.argv[1])
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    found = {"steered": fit_steered(folder, "steered")}
    with mock.patch.object(scalars.ExactMean, "_add", add_rounded):
        found["control"] = fit_steered(folder, "control", "plain")
    found["swa"] = fit_averaged(folder)
    found["mean"] = fit_mean(folder)
    rank = int(os.environ.get("RANK", "0"))
    (folder / f"found-{PROCESSES}-{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
