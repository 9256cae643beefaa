"""Data that ``train_dataloader`` and ``val_dataloader`` draw do not depend on when that is."""

import random
from functools import partial

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule
from resuming import evidence
from torch.utils.data import DataLoader, Subset
from trainings import NoisyDigits


class DrawnDigits(LightningDataModule):
    """Draws which samples are trained and validated, with each of the process's generators."""

    def __init__(self):
        super().__init__()
        self.drawn = {"train": [], "validate": []}

    def train_dataloader(self):
        return self.draw("train", 64)

    def val_dataloader(self):
        return self.draw("validate", 32)

    def draw(self, stage, size):
        order = np.random.permutation(96)[torch.randperm(96)].tolist()
        samples = random.sample(order, size)
        self.drawn[stage].append(samples)
        return DataLoader(Subset(NoisyDigits(), samples), batch_size=16)


class DrawingCallback(Callback):
    """Draws from the training's generators before the loaders of the training are made."""

    def on_sanity_check_start(self, trainer, pl_module):
        torch.rand(3)


@pytest.mark.parametrize("every", [0, 1, 2], ids="reloaded every {}".format)
def test_a_resumed_run_draws_the_same_data(fits, every):
    places = [{"epoch": 1, "batch": 2}, {"hook": "on_train_epoch_end"}]
    run = {"datamodule": DrawnDigits, "reload_dataloaders_every_n_epochs": every, "max_epochs": 4}
    fits.check(*places, **run)


def test_validation_data_do_not_depend_on_the_sanity_check(fits):
    run = partial(fits.fit, datamodule=DrawnDigits, callbacks=lambda: [DrawingCallback()])
    expected = evidence(run(num_sanity_val_steps=2))
    drawn = fits.trainer.datamodule.drawn
    assert evidence(run(num_sanity_val_steps=0)) == expected
    assert fits.trainer.datamodule.drawn == drawn
    run(num_sanity_val_steps=0, check_val_every_n_epoch=3)
    assert fits.trainer.datamodule.drawn == drawn


def test_each_stage_reload_seed_and_fit_draws_other_data(fits):
    firsts = []
    for seed in (3, 4, 4):
        fits.fit(datamodule=DrawnDigits, reload_dataloaders_every_n_epochs=1, words={"seed": seed})
        drawn = fits.trainer.datamodule.drawn
        firsts += [tuple(samples[0:8]) for stage in drawn.values() for samples in stage]
        if seed == 4:
            fits.new_process = lambda: None  # the last one is the second fit of a process
    assert len(firsts) == len(set(firsts)) == 3 * 6
