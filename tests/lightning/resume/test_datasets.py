"""State that a dataset keeps in any way is exact after a resume, or the resume is refused."""

import random
from functools import partial
from importlib import import_module

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.callbacks import Callback
from resuming import Curriculum, Fits, evidence
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    WeightedRandomSampler,
)
from trainings import NoisyDigits, make_loader, make_model

pytestmark = [
    pytest.mark.filterwarnings("ignore:Your `IterableDataset` has `__len__`:UserWarning"),
    pytest.mark.filterwarnings("ignore:Your `val_dataloader`'s sampler has shuffling:UserWarning"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),  # torchdata's own
]


@pytest.fixture
def fits(tmp_path, new_process):
    def begin():
        Keeping.total = Drawing.total = 0
        SEEN.clear()
        new_process()

    return Fits(tmp_path, begin)


class Keeping(Dataset):
    """Digits to which is added what a dataset keeps: private, nested, in its class, made late."""

    total = 0

    def __init__(self):
        self.digits, self._count, self.table = NoisyDigits(), 0, {"sum": 0.0, "seen": []}
        self.order, self.array, self.tensor = list(range(9)), np.zeros(2), torch.zeros(2)

    def change(self):
        self._count += 1
        Keeping.total += 1
        self.late = getattr(self, "late", 1.0) * 1.01
        self.table["sum"] += 0.1
        self.table["seen"].append(self._count)
        self.order.append(self.order.pop(0))
        self.array[0] += 1
        self.tensor.data[0] += 1
        kept = self._count + self.total + self.late + self.table["sum"] + sum(self.table["seen"])
        return float(kept + self.order[0] + self.array[0] + self.tensor[0])


class ByIndex(Keeping):
    """Changes with each sample."""

    def __len__(self):
        return 96

    def __getitem__(self, index):
        image, label = self.digits[index]
        return image + 1e-5 * self.change(), label


class Stream(Keeping, IterableDataset):
    """Changes with each epoch, and with each sample."""

    def __len__(self):
        return 96

    def __iter__(self):
        self.change()
        random.shuffle(self.order)
        for index in range(96):
            image, label = self.digits[index]
            yield image + 1e-5 * self.change(), label


class Drawn(IterableDataset):
    """A stream without a length that draws its order, which a callback may turn, and noise."""

    epoch = 0

    def __iter__(self):
        digits = NoisyDigits()
        order = np.roll(np.random.permutation(96), self.epoch)
        return (digits[int(index)] for index in order)


class Told(NoisyDigits):
    """Digits with a value of the epoch, which the program sets."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __getitem__(self, index):
        image, label = super().__getitem__(index)
        return image + 0.1 * self.epoch, label


class SetEpoch(Callback):
    """Sets the epoch of the data, as Hugging Face asks for."""

    def on_train_epoch_start(self, trainer, pl_module):
        data, epoch = trainer.train_dataloader.dataset, trainer.current_epoch
        if isinstance(data, Told):
            data.set_epoch(epoch)
        else:
            data.epoch = epoch


class Reweigh(Callback):
    """Changes the weights by which a sampler of torch draws, as to mine hard samples."""

    def on_train_epoch_end(self, trainer, pl_module):
        trainer.train_dataloader.sampler.weights *= torch.rand(96)


class Joining:
    """A function that joins samples and counts its batches."""

    def __init__(self):
        self.batches = 0

    def __call__(self, samples):
        self.batches += 1
        images, labels = zip(*samples, strict=True)
        return torch.stack(images) + 1e-3 * self.batches, torch.stack(labels)


class Batches:
    """Batches from no loader of torch's."""

    def __iter__(self):
        return iter(stream(Drawn))


class Reloaded(LightningDataModule):
    """Gives new loaders, whose dataset keeps state, in every epoch."""

    def train_dataloader(self):
        return DataLoader(ByIndex(), batch_sampler=Curriculum())

    def val_dataloader(self):
        return make_loader(shuffle=False)


class Shrinking(Reloaded):
    """Gives smaller batches in every epoch."""

    size = 32

    def train_dataloader(self):
        self.size //= 2
        return DataLoader(NoisyDigits(), self.size)


class Setting(Callback):
    """Sets a value of the dataset within the epoch, which running workers do not get."""

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        trainer.train_dataloader.dataset.level = f"level {trainer.global_step}"


class Level(NoisyDigits):
    level = "level 0"

    def __getitem__(self, index):
        image, label = super().__getitem__(index)
        return image + 0.01 * len(self.level), label


class Lazy(NoisyDigits):
    """Makes a generator when it is read first."""

    rng = None

    def __getitem__(self, index):
        self.rng = self.rng or np.random.default_rng(3)
        image, label = super().__getitem__(index)
        return image + self.rng.random(), label


class Caching(NoisyDigits):
    """Keeps a handle and samples, which change nothing."""

    def __init__(self):
        super().__init__()
        self.cache, self.handle = {}, None

    def __getitem__(self, index):
        self.handle = self.handle or memoryview(b"data")
        image = self.cache.setdefault(index, self.images[index])
        return image + 0.01 * torch.rand(64), self.classes[index]


class Stating(NoisyDigits):
    """Says a state that no loader of torch saves."""

    read = 0

    def __getitem__(self, index):
        self.read += 1
        image, label = super().__getitem__(index)
        return image + 0.01 * self.read, label

    def state_dict(self):
        return {"read": self.read}

    def load_state_dict(self, state):
        self.read = state["read"]


class StatingStream(Stating, IterableDataset):
    def __iter__(self):
        return (self[index] for index in range(96))


def level(**words):
    return {"loader": lambda: DataLoader(Level(), 16, **words), "callbacks": lambda: [Setting()]}


def cached(**words):
    return DataLoader(Caching(), 16, shuffle=True, **words)


def by_index(wrap=lambda dataset: dataset, **words):
    return DataLoader(wrap(ByIndex()), batch_size=16, shuffle=True, **words)


def nested(dataset):
    return Subset(ConcatDataset([NoisyDigits(48), dataset]), range(20, 116))


def weighted():
    return DataLoader(NoisyDigits(), 16, sampler=WeightedRandomSampler([1.0] * 96, 96))


def stream(kind=Stream, **words):
    return DataLoader(kind(), batch_size=16, **words)


def told(workers):
    return DataLoader(Told(), batch_size=16, num_workers=workers)


WITHIN, AT_END = {"batch": 3}, {"hook": "on_train_epoch_end", "batch": 6}
VALIDATED = {"hook": "on_validation_batch_end", "batch": 6}
PERSISTENT = {"num_workers": 1, "persistent_workers": True}
STEPS = {"max_epochs": -1, "max_steps": 18}
drawn = partial(stream, Drawn)
EXACT = {
    "by index": ({"loader": by_index}, [WITHIN, VALIDATED, AT_END]),
    "nested": ({"loader": partial(by_index, nested)}, [WITHIN, AT_END]),
    "said": ({"loader": lambda: DataLoader(Stating(), 16)}, [WITHIN, AT_END]),
    "in workers": ({"loader": partial(by_index, num_workers=1)}, [AT_END]),
    "weighted": ({"loader": weighted, "callbacks": lambda: [Reweigh()]}, [WITHIN, AT_END]),
    "a stream": ({"loader": stream}, [VALIDATED, AT_END]),
    "a stream in a worker": ({"loader": partial(stream, num_workers=1)}, [AT_END]),
    "validation in workers": ({"validate": partial(by_index, num_workers=1)}, [WITHIN]),
    "validation by index": ({"validate": by_index}, [WITHIN, VALIDATED, AT_END]),
    "a validated stream": ({"validate": stream}, [WITHIN, VALIDATED, AT_END]),
    "joined": ({"loader": lambda: by_index(collate_fn=Joining())}, [WITHIN, AT_END]),
    "drawn": ({"loader": drawn}, [VALIDATED, AT_END, {"batch": 6}]),
    "drawn for some steps": ({"loader": drawn} | STEPS, [AT_END]),
    "drawn in a worker": ({"loader": partial(drawn, **PERSISTENT)}, [AT_END]),
    "drawn by no loader": ({"loader": Batches}, [AT_END]),
    "what a hook sets": (level(), [WITHIN]),
    "what a hook sets beside persistent workers": (level(**PERSISTENT), [WITHIN, AT_END]),
    "a cache and a handle": ({"loader": cached}, [WITHIN, AT_END]),
    "a cache in workers": ({"loader": partial(cached, **PERSISTENT)}, [WITHIN, AT_END]),
    **{
        f"told its epoch, {workers} workers": (
            {"loader": partial(told, workers), "callbacks": lambda: [SetEpoch()]},
            [WITHIN, AT_END],
        )
        for workers in (0, 1)
    },
    "an epoch that is set": ({"loader": drawn, "callbacks": lambda: [SetEpoch()]}, [AT_END]),
}


@pytest.mark.parametrize(("words", "places"), EXACT.values(), ids=EXACT)
def test_what_a_dataset_keeps_in_any_way_is_restored(fits, words, places):
    fits.check(*places, **words)


def reloaded(kind):
    return {"datamodule": kind, "reload_dataloaders_every_n_epochs": 1}


IN_WORKERS = r"changes dataset\.\w+.* in its workers"
BY_INDEX, STREAM = (partial(kind, **PERSISTENT) for kind in (by_index, stream))
OWN_SIZE = r"values that change: .*datamodule\.size"
REFUSED = {
    "by workers, within": ({"loader": partial(by_index, num_workers=1)}, WITHIN, IN_WORKERS),
    "by workers that live on": ({"loader": BY_INDEX}, AT_END, IN_WORKERS),
    "a stream in such": ({"loader": STREAM}, AT_END, IN_WORKERS),
    "a stream in such that says its state": (
        {"loader": partial(stream, StatingStream, **PERSISTENT)},
        AT_END,
        IN_WORKERS,
    ),
    "a validation in such": ({"validate": BY_INDEX}, AT_END, IN_WORKERS),
    "a validated stream in such": ({"validate": STREAM}, AT_END, IN_WORKERS),
    "a reloaded dataset": (
        reloaded(Reloaded),
        AT_END,
        r"values that change: train\.0\.dataset\._count, .*train\.0\.sampler\.epoch, ",
    ),
    "what makes the next loader": (reloaded(Shrinking), AT_END, OWN_SIZE),
    "what made the loader": (reloaded(Shrinking), WITHIN, OWN_SIZE),
    "what a hook sets and workers do not get": (
        level(num_workers=1),
        WITHIN,
        r"0\.dataset\.level changes in the fit",
    ),
    "a generator that is made late": (
        {"loader": lambda: DataLoader(Lazy(), 16)},
        WITHIN,
        r"train\.0\.dataset\.rng",
    ),
}


@pytest.mark.parametrize(("words", "place", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_restored_is_refused_by_name(fits, words, place, message):
    fits.refuse(message, at=place, **words)


SEEN = []


class Drawing(NoisyDigits):
    """Reading changes a generator, a list of this file and a variable of the class."""

    total = 0

    def __init__(self):
        super().__init__(48)
        self.rng = np.random.default_rng(1)

    def __getitem__(self, index):
        image, label = super().__getitem__(index)
        SEEN.append(len(SEEN) % 7)
        Drawing.total += 1
        return image + self.rng.random() + 0.01 * sum(SEEN) + 0.001 * Drawing.total, label


class DrawingStream(Drawing, IterableDataset):
    def __iter__(self):
        return (self[index] for index in range(48))


class KnowingStream(DrawingStream):
    """Says where it is, and forgets its generator."""

    at = start = 0

    def __iter__(self):
        start, self.start = self.start, 0
        for index in range(start, 48):
            self.at = index + 1
            yield self[index]

    def state_dict(self):
        return {"at": self.at % 48}

    def load_state_dict(self, state):
        self.start = state["at"]


class OneDataset(LightningDataModule):
    """Trains and validates with one dataset, in new loaders."""

    def __init__(self):
        super().__init__()
        self.data = Drawing()

    def train_dataloader(self):
        return DataLoader(self.data, 16, shuffle=True)

    val_dataloader = train_dataloader


class LoadedAgain(OneDataset):
    def val_dataloader(self):
        return make_loader(shuffle=False)


class HookDraws(Callback):
    """Draws from the generator of a dataset in hooks."""

    def on_train_start(self, trainer, module):
        (loader,) = trainer.fit_loop._combined_loader.flattened
        return loader.dataset.rng.random()

    def on_train_batch_end(self, trainer, module, *_):
        module.layers[0].bias.data += 1e-3 * self.on_train_start(trainer, module)


def drawing(kind=Drawing, make=DataLoader, **words):
    return make(kind(), batch_size=16, **words)


def stateful(kind=Drawing, **words):
    return drawing(kind, import_module("torchdata.stateful_dataloader").StatefulDataLoader, **words)


def both(self, batch, _):
    losses = [torch.nn.functional.cross_entropy(self.layers(x), y) for x, y in batch.values()]
    return sum(losses)


HOOKS = {"callbacks": lambda: [HookDraws()]}
IN, MID = {}, {"hook": "on_validation_batch_end"}
END = {"hook": "on_train_epoch_end", "epoch": 0}
RELOADED = {"datamodule": LoadedAgain, "reload_dataloaders_every_n_epochs": 1}
LOADERS = {
    "in this process": ({"loader": drawing} | HOOKS, [IN, END]),
    "in workers": ({"loader": partial(drawing, num_workers=2)} | HOOKS, [END]),
    "a stream": ({"loader": partial(drawing, DrawingStream)}, [END]),
    "a stream in a worker": ({"loader": partial(drawing, DrawingStream, num_workers=1)}, [END]),
    "torchdata's": ({"loader": stateful} | HOOKS, [IN, END]),
    "torchdata's, of a stream": ({"loader": partial(stateful, DrawingStream)}, [IN, END]),
    "one that knows": ({"loader": partial(stateful, KnowingStream)} | HOOKS, [IN, END]),
    "of a validation": ({"validate": drawing}, [IN, MID, END]),
    "of one dataset": ({"datamodule": OneDataset}, [IN, MID, END]),
    "loaded again": (RELOADED, [IN]),
    "combined": (
        {
            "loader": lambda: {"a": drawing(), "b": drawing(shuffle=True)},
            "model": lambda: make_model(training_step=both),
        },
        [IN, END],
    ),
}


@pytest.mark.parametrize(("words", "places"), LOADERS.values(), ids=LOADERS)
def test_what_any_kind_of_loader_reads_is_restored(fits, words, places):
    fits.check(*places, max_epochs=2, **words)


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


class DrawsFirst(Callback):
    """Draws from the training's generators before the loaders of the training are made."""

    def on_sanity_check_start(self, trainer, pl_module):
        torch.rand(3)


@pytest.mark.parametrize("every", [0, 1, 2], ids="reloaded every {}".format)
def test_a_resumed_run_draws_the_same_data(fits, every):
    places = [{"epoch": 1, "batch": 2}, {"hook": "on_train_epoch_end"}]
    run = {"datamodule": DrawnDigits, "reload_dataloaders_every_n_epochs": every, "max_epochs": 4}
    fits.check(*places, **run)


def test_validation_data_do_not_depend_on_the_sanity_check(fits):
    run = partial(fits.fit, datamodule=DrawnDigits, callbacks=lambda: [DrawsFirst()])
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
