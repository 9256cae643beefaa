"""Gradients that a module keeps between steps are saved, or a resume that needs them is refused."""

import pytest
import torch
from ledger_runs import find_breaks
from resuming import make_saver
from torch import nn
from torch.utils.data import DataLoader
from trainings import NoisyDigits, make_model

from lightning_d9m.lightning.saved_state import SavedState

WITHIN = {"batch": 3}
WORDS = {"limit_val_batches": 0, "max_epochs": 2}


def manual(zero=lambda module: None):
    """Return a model that steps in each batch, and zeroes as it is told before the next."""

    def step(self, batch, batch_idx):
        zero(self)
        self.manual_backward(nn.functional.cross_entropy(self.layers(batch[0]), batch[1]))
        self.optimizers().step()

    model = make_model(training_step=step)
    model.automatic_optimization = False
    return model


def automatic(zero):
    """Return a model that zeroes as it is told where Lightning would."""

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        zero(self)

    return make_model(optimizer_zero_grad=optimizer_zero_grad)


def remove(module):
    for parameter in module.parameters():
        parameter.grad = None


def fill(module):
    module.optimizers().zero_grad(set_to_none=False)


def halve(module):
    for parameter in module.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)


def pass_by(module):
    """Keep the gradients."""


@pytest.mark.parametrize(("make", "zero"), [(manual, pass_by), (automatic, halve)])
def test_a_module_that_adds_to_gradients_of_a_step_is_not_resumed(fits, make, zero):
    """Unless with a warning, which the ledger has, and then without these gradients."""
    model = {"model": lambda: make(zero)} | WORDS
    error = fits.refuse("adds to the gradient of layers", at=WITHIN, **model)
    assert len(error.reasons) == 1
    with pytest.warns(UserWarning, match="adds to the gradient of layers"):
        folder = fits.resume(**model, words={"on_inexact_resume": "warn"})
    (found,) = find_breaks(folder / "rank-0.jsonl")
    assert ["adds to the gradient" in reason for reason in found.inexact] == [True]
    assert all(part.isfinite().all() for part in fits.model.parameters())


@pytest.mark.parametrize(("make", "zero"), [(manual, fill), (automatic, remove)])
def test_one_that_zeroes_them_is_resumed_and_saves_none(fits, make, zero):
    between = {"hook": "on_train_epoch_end", "batch": 6, "epoch": 0}
    fits.check(WITHIN, between, model=lambda: make(zero), **WORDS)
    for name in ("0.ckpt", "1.ckpt"):
        assert list_saved(fits.folder / name) == {None}


def list_saved(path):
    """Return the gradients in a checkpoint."""
    saved = SavedState.from_checkpoint(torch.load(path, weights_only=True))
    return set(saved.ranks[0].gradients.values())


class Unreadable(NoisyDigits):
    """A dataset whose files cannot be read."""

    def __getitem__(self, index):
        raise OSError("disk")


def test_a_checkpoint_before_the_first_batch_leaves_them_out_too(fits):
    """Until then a stand-in of NaN watches each."""
    model = {"model": manual} | WORDS
    fits.interrupt(**model, at=WITHIN)
    saver = make_saver(fits.checkpoint, hook="on_exception", stop=False)
    broken = {"loader": lambda: DataLoader(Unreadable(), 16), "enable_checkpointing": True}
    with pytest.raises(OSError, match="disk"):
        fits.resume(**model | broken, extra=[saver])
    assert saver.saved
    assert list_saved(fits.checkpoint) == {None}
