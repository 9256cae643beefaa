"""An iterable dataset that draws random numbers is resumed exactly at the end of an epoch."""

from functools import partial

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule
from resuming import Curriculum, DrawingDigits
from torch.utils.data import DataLoader, IterableDataset
from trainings import NoisyDigits, make_loader

from lightning_d9m.errors import InexactResumeError

pytestmark = [
    pytest.mark.filterwarnings("ignore:Your `IterableDataset` has `__len__` defined:UserWarning"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),  # torchdata's own
]


class DrawnStream(IterableDataset):
    """A stream that draws its order when it starts, and noise for each sample."""

    def __iter__(self):
        digits = NoisyDigits()
        order = np.random.permutation(96)
        return (self.add_noise(*digits[int(index)]) for index in order)

    def add_noise(self, image, label):
        return image + 0.1 * torch.rand(64) + 0.1 * np.random.rand(), label


class SizedStream(DrawnStream):
    """The same, and it says how many samples it has."""

    def __len__(self):
        return 96


class StreamWithGenerator(DrawnStream):
    """A stream with a random generator of its own."""

    def __init__(self):
        self.rng = np.random.default_rng(5)

    def add_noise(self, image, label):
        return image + 0.1 * self.rng.random(), label


class Shuffle:
    """A stage of a stream that counts its epochs, as WebDataset's ``detshuffle`` does."""

    def __init__(self):
        self.epoch = -1

    def order(self):
        self.epoch += 1
        return np.random.default_rng(self.epoch).permutation(96)


class CountingStream(DrawnStream):
    """A stream of a list of stages."""

    def __init__(self):
        self.stages = [Shuffle()]
        self.given = 0

    def __iter__(self):
        digits = NoisyDigits()
        for index in self.stages[0].order():
            self.given += 1
            yield self.add_noise(*digits[int(index)])


class SizedCountingStream(CountingStream):
    """The same, and it says how many samples it has."""

    def __len__(self):
        return 96


class SetStream(DrawnStream):
    """A stream whose epoch a callback sets."""

    def __init__(self):
        self.epoch = 0

    def __iter__(self):
        digits = NoisyDigits()
        order = np.random.default_rng(self.epoch).permutation(96)
        return (self.add_noise(*digits[int(index)]) for index in order)


class SetEpoch(Callback):
    """Sets the epoch of the stream, as Hugging Face asks for."""

    def on_train_epoch_start(self, trainer, pl_module):
        trainer.train_dataloader.dataset.epoch = trainer.current_epoch


def make_stream(dataset=DrawnStream, **words):
    return DataLoader(dataset(), batch_size=16, **words)


def stateful(dataset=DrawnStream, **words):
    loaders = pytest.importorskip("torchdata.stateful_dataloader")
    return loaders.StatefulDataLoader(dataset(), batch_size=16, **words)


class Batches:
    """Batches from no loader of torch's."""

    def __iter__(self):
        return iter(make_stream())


LOADERS = {
    "without a length": make_stream,
    "with a generator": partial(make_stream, StreamWithGenerator),
    "a persistent worker": partial(make_stream, num_workers=1, persistent_workers=True),
    "counting": partial(make_stream, CountingStream),
    "stateful with a length": partial(stateful, SizedStream),
    "not torch's": Batches,
}
BETWEEN = {"hook": "on_train_epoch_end"}
PLACES = [BETWEEN, {"hook": "on_validation_end", "batch": 6}, {"batch": 6}]
WITHIN = {"epoch": 2, "batch": 3}
STEPS = {"max_epochs": -1, "max_steps": 18}


@pytest.mark.parametrize("name", LOADERS)
def test_resumes_exactly_at_the_end_of_an_epoch(fits, name):
    places = {"without a length": PLACES[:2], "counting": PLACES[::2]}
    fits.check(*places.get(name, PLACES[:1]), loader=LOADERS[name])


@pytest.mark.parametrize("name", ["stateful with a length", "without a length"])
def test_resumes_a_run_of_a_number_of_steps_exactly(fits, name):
    fits.check(BETWEEN, loader=LOADERS[name], **STEPS)


def test_a_stream_that_counts_is_resumed_within_an_epoch(fits):
    """The loader of torchdata reads and skips the batches that were trained."""
    counting = partial(stateful, SizedCountingStream)
    fits.check(WITHIN, loader=counting)
    with pytest.raises(InexactResumeError, match=r"SizedCountingStream does not have state_dict"):
        fits.fit(loader=partial(counting, num_workers=1), resume=fits.folder / "0.ckpt")


def test_a_stream_whose_epoch_is_set_keeps_what_the_hook_sets(fits):
    fits.check(BETWEEN, loader=partial(make_stream, SetStream), callbacks=lambda: [SetEpoch()])


class Reloaded(LightningDataModule):
    """Gives new loaders, whose dataset has a generator, in every epoch."""

    def __init__(self, make_dataset):
        super().__init__()
        self.make_dataset = make_dataset

    def train_dataloader(self):
        if self.make_dataset is DrawingDigits:
            return DataLoader(DrawingDigits(), batch_sampler=Curriculum())
        return DataLoader(self.make_dataset(), batch_size=16)

    def val_dataloader(self):
        return make_loader(shuffle=False)


RELOADED = {"reload_dataloaders_every_n_epochs": 1}


@pytest.mark.parametrize(
    ("dataset", "state"),
    [
        (DrawingDigits, r"rng, .*train\.0\.sampler\.epoch, train\.0\.sampler\.order, .*weights"),
        (StreamWithGenerator, "rng"),
        (CountingStream, r"given, train\.0\.dataset\.stages\[0\]\.epoch"),
    ],
)
def test_state_of_reloaded_datasets_cannot_be_resumed(fits, dataset, state):
    run = {"datamodule": partial(Reloaded, dataset)} | RELOADED
    fits.interrupt(**run, at=BETWEEN)
    named = rf"values that change: train\.0\.dataset\.{state}\. "
    with pytest.raises(InexactResumeError, match=named):
        fits.resume(**run)
