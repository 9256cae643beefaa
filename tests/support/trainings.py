"""Small real trainings for the callback's tests: scikit-learn's digits, a net with dropout."""

import importlib
import random
from functools import cache
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_d9m.engine.control import session

QUIET = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_model_summary": False,
    "enable_progress_bar": False,
    "accelerator": "cpu",
}


read_digits = cache(load_digits)


class NoisyDigits(Dataset):
    """Digits with augmentation noise from Python, NumPy and torch, as user code draws it."""

    def __init__(self, size: int = 96) -> None:
        digits = read_digits()
        self.images = torch.tensor(digits.data[:size], dtype=torch.float32) / 16
        self.classes = torch.tensor(digits.target[:size])

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        noise = random.random() + float(np.random.rand()) + torch.rand(64)
        return self.images[index] + 0.01 * noise, self.classes[index]


def make_model(package: str = "lightning.pytorch", **overrides: Any) -> Any:
    """Build a model of the given package; ``overrides`` replace its methods."""
    base = importlib.import_module(package).LightningModule

    class Net(base):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(
                nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 10)
            )

        def training_step(self, batch, batch_idx):
            images, classes = batch
            loss = nn.functional.cross_entropy(self.layers(images), classes)
            self.log("train_loss", loss)
            return loss

        def validation_step(self, batch, batch_idx):
            images, classes = batch
            self.log("val_loss", nn.functional.cross_entropy(self.layers(images), classes))

        def test_step(self, batch, batch_idx):
            self.validation_step(batch, batch_idx)

        def predict_step(self, batch, batch_idx):
            return self.layers(batch[0])

        def configure_optimizers(self):
            optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]

    for name, method in overrides.items():
        setattr(Net, name, method)
    torch.default_generator.manual_seed(7)  # unlike torch.manual_seed, numbers no fit
    return Net()


def make_loader(*, size: int = 96, shuffle: bool = True, **settings: Any) -> DataLoader:
    return DataLoader(NoisyDigits(size), batch_size=16, shuffle=shuffle, **settings)


def fit(
    model,
    *loaders,
    package="lightning.pytorch",
    resumed=None,
    seed=5,
    folder=None,
    settings=None,
    **words,
):
    """Train as the first fit of a process does; return the Trainer.

    Args:
        model: The module.
        loaders: Those of training and of validation.
        package: The package of the Trainer.
        resumed: A checkpoint.
        seed: That of a ``DeterminismCallback``; without it the Trainer has none.
        folder: Where its ledger goes.
        settings: Its other settings.
        words: Arguments of the Trainer, which stand before those for one quiet epoch.
    """
    from lightning_d9m import DeterminismCallback  # takes its bases from packages that are loaded

    session.restart_fits()
    callbacks = words.pop("callbacks", [])
    if seed is not None:
        own = DeterminismCallback(seed=seed, ledger_dir=folder, **settings or {})
        callbacks = [own, *callbacks]
    words = QUIET | {"max_epochs": 1, "devices": 1, "num_sanity_val_steps": 0} | words
    trainer = importlib.import_module(package).Trainer(callbacks=callbacks, **words)
    trainer.fit(model, *loaders, ckpt_path=resumed)
    return trainer


def make_exception_saver(folder, name):
    """Return the callback that saves a checkpoint where an exception ends a fit."""
    from lightning.pytorch import callbacks

    try:
        return callbacks.ModelCheckpoint(folder, filename=name, save_on_exception=True)
    except TypeError:  # before Lightning 2.6
        return callbacks.OnExceptionCheckpoint(folder, name)
