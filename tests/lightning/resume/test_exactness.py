"""What loaders keep for themselves is restored, or it is said that it cannot be: in good time."""

from functools import partial

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from resuming import DrawingDigits, Fits, agree, in_order, stream
from torch.utils.data import DataLoader
from trainings import make_loader, make_model

from lightning_d9m.errors import InexactResumeError

pytestmark = [
    pytest.mark.usefixtures("unseeded", "new_process"),
    pytest.mark.filterwarnings("ignore:Your `IterableDataset` has `__len__`:UserWarning"),
]


@pytest.fixture
def fits(tmp_path, new_process):
    return Fits(tmp_path, new_process)


def drawing(**words):
    return DataLoader(DrawingDigits(), batch_size=16, **words)


WORKERS = {"num_workers": 1}
PERSISTENT = WORKERS | {"persistent_workers": True}
WITHIN, BETWEEN = {"batch": 2, "epoch": 0}, {"hook": "on_train_epoch_end", "epoch": 0, "batch": 6}
OUT_OF_REACH = {
    "training, within an epoch": ("loader", WORKERS, WITHIN),
    "training, by workers that live on": ("loader", PERSISTENT, BETWEEN),
    "validation, by workers that live on": ("validate", PERSISTENT, BETWEEN),
}


@pytest.mark.parametrize(("part", "words", "place"), OUT_OF_REACH.values(), ids=OUT_OF_REACH)
def test_generators_in_workers_that_cannot_be_saved_are_named(fits, part, words, place):
    """The run that goes on is refused, whether it has workers or not."""
    fits.interrupt(**{part: partial(drawing, **words)}, at=place, max_epochs=2)
    with pytest.raises(InexactResumeError, match=r"DrawingDigits draws from .* \(dataset\.rng\)"):
        fits.resume(**{part: drawing}, max_epochs=2)


@pytest.mark.parametrize("part", ["loader", "validate"])
def test_workers_that_end_with_the_epoch_take_none_along(fits, part):
    run = {part: partial(drawing, **WORKERS), "max_epochs": 2}
    straight = fits.fit(**run)
    fits.interrupt(**run, at=BETWEEN)
    agree(straight, fits.resume(**run))


def test_a_validation_whose_loaders_come_later_goes_on(fits):
    """The resumed run has none before the epoch that is validated."""
    run = {"validate": drawing, "check_val_every_n_epoch": 2, "max_epochs": 4}
    straight = fits.fit(**run)
    fits.interrupt(**run, at={"epoch": 2, "batch": 2})
    agree(straight, fits.resume(**run))


@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_validation_end"])
def test_a_stream_is_resumed_when_nothing_of_its_epoch_is_left(fits, hook):
    """Where a ModelCheckpoint saves by default: after the validation that ends the epoch."""
    run = {"loader": stream, "max_epochs": 3}
    straight = fits.fit(**run)
    fits.interrupt(**run, at={"hook": hook, "batch": 6})
    agree(straight, fits.resume(**run))


class TestForetold:
    """Before a run trains that could not be resumed within an epoch."""

    def test_it_is_said_where_checkpoints_are_saved_there(self, fits, caplog):
        every = {"enable_checkpointing": True, "max_epochs": 1}
        often = ModelCheckpoint(fits.folder, every_n_train_steps=2)
        fits.fit(loader=stream, extra=[often], **every)
        assert "could not be resumed exactly" in caplog.text
        assert "StatefulDataLoader" in caplog.text

    def test_it_is_not_said_where_they_are_saved_between_epochs(self, fits, caplog):
        between = ModelCheckpoint(fits.folder)
        fits.fit(loader=stream, extra=[between], enable_checkpointing=True, max_epochs=1)
        assert "could not be resumed exactly" not in caplog.text

    @pytest.mark.parametrize(
        ("part", "loader"),
        [("loader", stream), ("validate", partial(drawing, **PERSISTENT))],
        ids=["training", "validation"],
    )
    def test_it_is_an_error_where_the_user_asks_for_that(self, fits, part, loader):
        def step(self, batch, batch_idx):
            raise AssertionError("it is said before anything is trained")

        run = {"model": partial(make_model, training_step=step), part: loader}
        words = {"on_inexact_resume": "raise_early"}
        with pytest.raises(
            InexactResumeError, match="Checkpoints of this run could not be resumed"
        ):
            fits.fit(**run, words=words, num_sanity_val_steps=0)

    def test_a_run_that_can_be_resumed_goes_on(self, fits):
        words = {"on_inexact_resume": "raise_early"}
        fits.fit(loader=make_loader, validate=in_order, words=words, max_epochs=1)
