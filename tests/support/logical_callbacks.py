"""Trainings whose callbacks steer them; see lightning/logical_ranks/test_training.py."""

import os
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import (
    BasePredictionWriter,
    EarlyStopping,
    EMAWeightAveraging,
    ModelCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from logical_trainings import PROCESSES, Classifier, fit, make_data, make_net
from torch.utils.data import DataLoader
from trainings import QUIET

from lightning_d9m import DDPDeterministicStrategy, DeterminismCallback
from lightning_d9m.control import session
from lightning_d9m.hashing.digest import digest_value

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


class Writing(BasePredictionWriter):
    """Keeps the digest of each sample's prediction."""

    def __init__(self):
        super().__init__("batch")
        self.found = {}

    def write_on_batch_end(self, trainer, module, prediction, indices, batch, number, loader):
        for part, samples in zip(prediction, indices, strict=True):
            for row, sample in zip(part, samples, strict=True):
                assert self.found.setdefault(f"{loader} {sample}", digest_value(row))


def name_numbers(metrics):
    """Return logged values with their bits; those of a step alone are the process's own."""
    own = {"least_step", "mean_loss_step"}
    return {name: float(value).hex() for name, value in metrics.items() if name not in own}


def fit_steered(folder):
    """Train until a callback stops it; test and predict with what it leaves."""
    session._fits = 0
    stop = EarlyStopping("val_loss", patience=1, min_delta=0.3)
    best = ModelCheckpoint(
        folder / "steered" / f"kept-{PROCESSES}", "{epoch}-{val_loss:.9f}", monitor="val_loss"
    )
    noting, writing = Noting(), Writing()
    trainer = L.Trainer(
        max_epochs=8,
        strategy=DDPDeterministicStrategy(logical_ranks=LOGICAL_RANKS),
        devices=PROCESSES,
        callbacks=[
            DeterminismCallback(seed=5, ledger_dir=folder / "steered" / str(PROCESSES)),
            EMAWeightAveraging(decay=0.8, update_every_n_steps=2),
            *(stop, best, noting, writing),
        ],
        **QUIET | {"enable_checkpointing": True},
    )
    model = Steered(make_net("cnn"))
    loader = DataLoader(make_data(34), batch_size=3, shuffle=True)
    trainer.fit(model, loader, DataLoader(make_data(23), batch_size=2))
    found = {
        "stopped": [stop.stopped_epoch, trainer.global_step],
        "best": [Path(best.best_model_path).name, float(best.best_model_score).hex()],
        "fit": name_numbers(trainer.callback_metrics),
    }
    checkpoint = torch.load(best.best_model_path, weights_only=True)
    found["saved"] = digest_value([checkpoint["state_dict"], checkpoint["optimizer_states"]])
    loaders = [DataLoader(make_data(size), batch_size=2) for size in (23, 11)]
    trainer.test(model, loaders)
    found |= {"test": name_numbers(trainer.callback_metrics), "calls": noting.calls}
    trainer.predict(model, loaders)
    return found, writing.found


class Averaging(WeightAveraging):
    """The mean of the weights of all steps, which replaces the weights at the end."""

    def on_train_end(self, trainer, module):
        self.trained = digest_value(module.state_dict())
        super().on_train_end(trainer, module)


def fit_all(folder):
    """Train in each of the ways; return what is found, and the digests of the predictions."""
    steered, predicted = fit_steered(folder)
    swa = [StochasticWeightAveraging(0.01, 2, annealing_epochs=2)]
    state = fit(folder / "swa", "cnn", LOGICAL_RANKS, max_epochs=4, callbacks=swa)
    state = state.lightning_module.state_dict()
    averaging = Averaging()
    mean = fit(folder / "mean", "cnn", LOGICAL_RANKS, callbacks=[averaging])
    return {
        **steered,
        "swa": [digest_value(state), int(state["net.2.num_batches_tracked"])],
        "mean": [averaging.trained, digest_value(mean.lightning_module.state_dict())],
        "predicted": predicted,
        "rank": int(os.environ.get("RANK", "0")),
    }
