"""What loaders keep for themselves is restored, or it is said that it cannot be: in good time."""

from functools import partial

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint, ModelPruning
from resuming import Curriculum, DrawingDigits, agree, in_order, stream
from torch.utils.data import DataLoader, IterableDataset
from trainings import QUIET, NoisyDigits, make_loader, make_model

from lightning_d9m import DeterminismCallback
from lightning_d9m.errors import InexactResumeError

pytestmark = [
    pytest.mark.filterwarnings("ignore:Your `IterableDataset` has `__len__`:UserWarning"),
]


def drawing(**words):
    return DataLoader(DrawingDigits(), batch_size=16, **words)


WITHIN, BETWEEN = {"batch": 2, "epoch": 0}, {"hook": "on_train_epoch_end", "epoch": 0, "batch": 6}


def test_a_validation_whose_loaders_come_later_goes_on(fits):
    """The resumed run has none before the epoch that is validated."""
    words = {"check_val_every_n_epoch": 2, "max_epochs": 4}
    fits.check({"epoch": 2, "batch": 2}, validate=drawing, **words)


class CountedNumbers(IterableDataset):
    """An endless stream that counts what it has read, one batch ahead of the training."""

    def __init__(self):
        self.read = 0

    def __iter__(self):
        digits = NoisyDigits()
        while True:
            self.read += 1
            yield digits[self.read % 96]


def counted_stream():
    return DataLoader(CountedNumbers(), batch_size=16)


def shuffled_batches():
    return DataLoader(NoisyDigits(), batch_sampler=Curriculum())


@pytest.mark.parametrize("loader", [counted_stream, shuffled_batches])
def test_a_run_is_resumed_when_nothing_of_its_epoch_is_left(fits, loader):
    """Where a ModelCheckpoint saves by default: after the validation that ends the epoch."""
    places = [{"batch": 6}, {"hook": "on_validation_end", "batch": 6}]
    fits.check(*places, loader=loader, limit_train_batches=6)


def pruning():
    return [ModelPruning("l1_unstructured", amount=0.2)]


def test_pruned_weights_that_are_saved_without_their_masks_are_named(fits):
    fits.refuse(r"lacks .*_orig.*, which changes in the fit", callbacks=pruning, at={"batch": 2})


@pytest.mark.parametrize("every", [2, None])
def test_it_is_said_when_the_first_checkpoint_is_saved_within_an_epoch(fits, caplog, every):
    """Before a run trains on that could not be resumed there; not where all are between epochs."""
    saver = ModelCheckpoint(fits.folder, every_n_train_steps=every)
    fits.fit(loader=stream, extra=[saver], enable_checkpointing=True, max_epochs=1)
    assert caplog.text.count("cannot be resumed exactly") == (1 if every else 0)
    assert ("StatefulDataLoader" in caplog.text) == bool(every)


STEPS = {"max_epochs": -1, "max_steps": 15}


class Stopping(Callback):
    """Asks the Trainer to stop in the second batch of the fit."""

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        trainer.should_stop = trainer.global_step == 2


def skipping():
    """Return a model that ends each epoch after two batches."""
    model = make_model()
    model.on_train_batch_start = lambda batch, batch_idx: -1 if batch_idx == 2 else None
    return model


def monitoring():
    return [EarlyStopping("train_loss", patience=9)]


def ending():
    """Return a model that acts at the end of an epoch."""
    return make_model(on_train_epoch_end=lambda self: self.layers[0].weight.data.zero_())


CUT = {
    "should_stop": ({"extra": [Stopping()]}, "by trainer.should_stop, and Lightning begins the"),
    "a callback": (
        {"max_steps": 2, "callbacks": monitoring},
        r"callbacks.EarlyStopping.state_dict",
    ),
    "the module": ({"max_steps": 2, "model": ending}, r"changed layers.0.weight, where a"),
}


@pytest.mark.parametrize(("cut", "reason"), CUT.values(), ids=CUT)
def test_an_epoch_that_the_end_of_a_fit_cut_short_is_not_continued(fits, cut, reason):
    fits.fit(**STEPS | cut)
    assert fits.trainer.global_step == 2
    fits.trainer.save_checkpoint(fits.checkpoint)
    with pytest.raises(InexactResumeError, match=f"ended after 2 batches of epoch 0, .*{reason}"):
        fits.resume(**cut | STEPS)


PLATEAU = {"interval": "step", "reduce_on_plateau": True, "monitor": "val_loss", "frequency": 2}


def plateau(self):
    optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.7)
    return [optimizer], [PLATEAU | {"scheduler": scheduler}]


LONGER = {
    "as it is": ({}, 2),
    "in a later epoch": ({}, 8),
    "accumulation": ({"accumulate_grad_batches": 2}, 4),
    "a validation at that step": (
        {"val_check_interval": 2, "model": partial(make_model, configure_optimizers=plateau)},
        4,
    ),
    "loaders that are reloaded": ({"reload_dataloaders_every_n_epochs": 1}, 8),
}


@pytest.mark.filterwarnings("ignore:Checkpoint directory:UserWarning")
@pytest.mark.parametrize(("words", "steps"), LONGER.values(), ids=LONGER)
def test_an_epoch_that_max_steps_cut_short_is_continued(fits, words, steps):
    """The checkpoint is saved at the end of the fit, by the Trainer and by a callback."""
    straight = fits.fit(**STEPS | words)
    words = STEPS | words | {"enable_checkpointing": True}
    words["callbacks"] = lambda: [ModelCheckpoint(fits.folder, "end")]
    fits.fit(**words | {"max_steps": steps})
    fits.trainer.save_checkpoint(fits.checkpoint)
    agree(straight, fits.fit(**words, resume=fits.folder / "end.ckpt"))
    agree(straight, fits.resume(**words))


def test_a_fit_without_steps_left_loads_any_checkpoint(fits):
    few = STEPS | {"max_steps": 2}
    fits.fit(**few)
    fits.trainer.save_checkpoint(fits.checkpoint)
    callback = DeterminismCallback(seed=3, ledger_dir=fits.folder)
    trainer = L.Trainer(**QUIET, **few, callbacks=[callback], default_root_dir=fits.folder)
    trainer.fit(make_model(), make_loader(), in_order(), ckpt_path=fits.checkpoint)
    assert trainer.global_step == 2


@pytest.mark.filterwarnings("ignore:Checkpoint directory:UserWarning")
def test_a_checkpoint_within_the_epoch_that_max_steps_cut_short_is_continued(fits):
    straight = fits.fit(**STEPS)
    words = STEPS | {
        "enable_checkpointing": True,
        "callbacks": lambda: [ModelCheckpoint(fits.folder, "last", every_n_train_steps=2)],
    }
    fits.fit(**words | {"max_steps": 2})
    agree(straight, fits.fit(**words, resume=fits.folder / "last.ckpt"))


def test_an_epoch_that_a_hook_ends_in_every_run_is_continued(fits):
    fits.check(BETWEEN | {"batch": 2}, max_steps=6, max_epochs=-1, model=skipping)
