"""Each piece of what a checkpoint holds matters: without it, the bits are others, or it is said."""

import os
import random

import lightning.pytorch as L
import numpy as np
import pytest
import torch
from ledger_runs import find_breaks
from resuming import Curriculum, DrawingCollate, DrawingDigits, Fits, OwnOrder, evidence
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics import CatMetric, MeanMetric, Metric, MetricCollection, SumMetric
from torchmetrics.classification import MulticlassAccuracy
from torchmetrics.wrappers import Running
from trainings import NoisyDigits, make_model

from lightning_d9m import D9mError
from lightning_d9m.control import session
from lightning_d9m.control.seeding import capture_generators
from lightning_d9m.lightning.saved_state import FORMAT, KEY, MANIFEST_KEY
from lightning_d9m.state.plain_data import decode_plain, encode_plain, pack_bytes, unpack_bytes


class DrawingCallback(L.Callback):
    """A callback with a generator and a metric of its own."""

    def __init__(self):
        self.rng = np.random.RandomState(13)
        self.sum = SumMetric()

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        drawn = 0.01 * self.rng.rand()
        self.sum.update(drawn)
        batch[0].add_(drawn)

    def on_train_epoch_end(self, trainer, module):
        module.log("drawn", self.sum.compute())


class Total(Metric):
    """Adds up numbers, or their sizes."""

    def __init__(self, *, sizes):
        super().__init__()
        self.sizes = sizes
        self.add_state("total", torch.tensor(0.0), dist_reduce_fx="sum")

    def update(self, number):
        self.total += abs(number) if self.sizes else number

    def compute(self):
        return self.total


def own_order():
    return DataLoader(DrawingDigits(), batch_sampler=OwnOrder(), collate_fn=DrawingCollate())


def drawing_step(self, batch, batch_idx):
    """Draw from every kind of generator, and measure in every way, as user code does."""
    noise = random.random() + float(np.random.rand()) + torch.rand(64) + self.own.random()
    noise = noise + torch.rand(64, generator=self.noise) + self.numpy.random() + self.legacy.rand()
    outputs = self.layers(batch[0] + 0.01 * noise)
    loss = torch.nn.functional.cross_entropy(outputs, batch[1])
    self.log("train_loss", loss, on_step=True, on_epoch=True)
    self.accuracy(outputs, batch[1])
    self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
    if batch_idx < 3:
        self.early(loss)
        self.log("early", self.early, on_step=False, on_epoch=True)
    self.whole.update(loss)
    self.listed.update(loss)
    self.last(loss)
    # Alike in the first batch, so that torchmetrics takes them for one ever after.
    self.pair.update(1.0 if self.global_step == 0 else -1.0)
    return loss


def log_measured(self):
    """Log what the module measures by itself: over the epoch, and over the whole training."""
    self.log("whole", self.whole.compute())
    self.log("listed", torch.as_tensor(self.listed.compute()).sum())
    self.log("last", self.last.compute())
    self.log_dict(self.pair.compute())
    self.log("seen", float(self.seen.compute()))
    self.pair.reset()


def measuring_validation(self, batch, batch_idx):
    outputs = self.layers(batch[0])
    self.seen.update(1)
    self.validated(outputs, batch[1])
    self.log("validated", self.validated)
    loss = torch.nn.functional.cross_entropy(outputs, batch[1])
    self.log("val_loss", loss)
    if self.trainer.fit_loop.epoch_loop.batch_idx == 2:
        self.log("earlier_loss", loss)


def make_drawing_model():
    model = make_model(
        training_step=drawing_step,
        validation_step=measuring_validation,
        on_train_epoch_end=log_measured,
    )
    model.own = random.Random(6)
    model.noise = torch.Generator().manual_seed(3)
    model.numpy = np.random.default_rng(4)
    model.legacy = np.random.RandomState(5)
    model.accuracy, model.validated = MulticlassAccuracy(10), MulticlassAccuracy(10)
    model.early, model.whole, model.seen = MeanMetric(), SumMetric(), SumMetric()
    model.listed, model.last = CatMetric(), Running(SumMetric(), 4)
    model.pair = MetricCollection({"numbers": Total(sizes=False), "sizes": Total(sizes=True)})
    return model


RUN = {
    "loader": own_order,
    "model": make_drawing_model,
    "callbacks": lambda: [DrawingCallback()],
    "validate": lambda: DataLoader(DrawingDigits(), batch_size=16),
    "accumulate_grad_batches": 2,
    "val_check_interval": 3,
    "max_epochs": 2,
}
OTHER = torch.Generator().manual_seed(1).get_state()


def replace_host(place):
    """Return a function that replaces the state of Python's or NumPy's generator."""
    other = random.Random(1).getstate(), np.random.RandomState(1).get_state(legacy=False)

    def replace(old):
        states = decode_plain(unpack_bytes(old))
        states[place] = other[place]
        return pack_bytes(encode_plain(states))

    return replace


def change(rank, path, value):
    """Put another value into a nested dict; without one, remove it."""
    *above, last = path
    for name in above:
        rank = rank[name]
    if value is None:
        del rank[last]
    else:
        rank[last] = value(rank[last])


GENERATORS = {
    "train.0.dataset.rng": np.random.default_rng(1),
    "train.0.collate_fn.rng": random.Random(1),
    "validate.0.dataset.rng": np.random.default_rng(1),
}
PROGRAM = [
    *("model.own", "model.noise", "model.numpy", "model.legacy", "model.accuracy.", "model.early."),
    *("model.whole.", "model.seen.", "model.pair._groups", "model.pair.numbers."),
    *("callbacks.DrawingCallback.rng", "callbacks.DrawingCallback.sum."),
]


def drop(start):
    """Return a function that leaves out the objects of the program whose paths begin so."""

    def leave(program):
        kept = {path: value for path, value in program.items() if not path.startswith(start)}
        assert kept.keys() != program.keys()
        return kept

    return leave


def another(name):
    """Return the state of a generator of the same kind."""
    return lambda old: capture_generators({"other": GENERATORS[name]})["other"]


def leave_out(key):
    """Return a function that leaves out one of the logged results."""
    return lambda results: [result for result in results if result["key"] != key]


STATE = ("callbacks", KEY)
RANK = (*STATE, "ranks", 0)
# The path of each piece that is saved, and what takes its place; then the bits are others.
PIECES = [
    ((*RANK, "rng", "host"), replace_host(0)),  # Python's generator
    ((*RANK, "rng", "host"), replace_host(1)),  # NumPy's
    ((*RANK, "rng", "torch"), lambda old: OTHER),
    ((*RANK, "rng"), lambda old: None),
    *(((*RANK, "generators", name), another(name)) for name in GENERATORS),
    *(((*RANK, "program"), drop(name)) for name in PROGRAM),
    ((*RANK, "results"), leave_out("training_step.early")),  # that a metric was logged
    ((*RANK, "samplers"), lambda old: {}),
    ((*RANK, "gradients"), lambda old: {}),
    ((*RANK, "results"), leave_out("training_step.train_loss")),
    ((*RANK, "callback_metrics"), lambda old: {}),
    ((*RANK, "pending", "evaluations"), lambda old: []),
    ((*RANK, "ledger"), lambda old: {"folder": "", "check": ""}),
    ((*STATE, "position", "epoch"), lambda n: n - 1),
    ((*STATE, "position", "batch"), lambda n: n - 1),
    ((*STATE, "position", "phase"), lambda _: "epoch"),
    ((*STATE, "fit"), lambda n: n + 1),
]
# The same, of what makes a resume inexact, and is said.
REFUSED = [
    (STATE, None, "has no lightning_d9m state"),
    ((*STATE, "format"), lambda n: 2, f"has format 2; this version reads {FORMAT}"),
    ((*STATE, "settings", "seed"), lambda n: 4, "saved with seed=4; now it is 3"),
    ((*STATE, "world_size"), lambda n: 2, "saved by 2 ranks; now there are 1"),
    (
        (*STATE, "position", "step"),
        lambda n: n - 1,
        "begins at step 5, and the checkpoint was saved at step 4",
    ),
    (
        (*RANK, "generators", "train.0.dataset.rng"),
        None,
        r"only in this run: train\.0\.dataset\.rng",
    ),
    ((*RANK, "inexact"), lambda old: ["A reason."], "- A reason."),
    (
        (*RANK, "rng"),
        None,
        r"state of the checkpoint is damaged: SavedRank has .*; it should have .*'rng'",
    ),
]


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    """Train, and save in the middle of an epoch, between two micro-batches."""
    fits = Fits(tmp_path_factory.mktemp("pieces"), lambda: setattr(session, "_fits", 0))
    return fits, evidence(fits.check({"batch": 5}, **RUN))


def resume_edited(fits, path, value, **words):
    """Resume from the checkpoint with a piece of it edited; return the ledger's folder."""
    checkpoint = torch.load(fits.folder / "0.ckpt", weights_only=True)
    del checkpoint["callbacks"][KEY][MANIFEST_KEY]  # which would tell at once
    change(checkpoint, path, value)
    torch.save(checkpoint, fits.folder / "edited.ckpt")
    return fits.fit(**words, resume=fits.folder / "edited.ckpt")


def flip(tensor):
    """Flip a bit that is not lost in a sum."""
    tensor.view(torch.uint8)[2] ^= 1
    return tensor


WEIGHT = (("state_dict", "layers.4.bias"), flip)  # which is trained on without the manifest


@pytest.mark.filterwarnings("ignore:The ``compute`` method of metric:UserWarning")
@pytest.mark.parametrize(("path", "value"), [*PIECES, WEIGHT])
def test_the_bits_are_others_without_a_piece(interrupted, path, value):
    fits, straight = interrupted
    folder = resume_edited(fits, path, value, **RUN)
    found = evidence(folder)
    (place,) = find_breaks(folder / "rank-0.jsonl")
    assert (place.epoch, place.step, place.batch) != (1, 5, 5) or any(
        found.get(key) != record for key, record in straight.items()
    )


@pytest.mark.parametrize(("path", "value", "message"), REFUSED)
def test_what_cannot_be_exact_is_said(interrupted, path, value, message):
    with pytest.raises(D9mError, match=message):
        resume_edited(interrupted[0], path, value, **RUN)


class Stages(L.LightningDataModule):
    """Gives other data in every second epoch."""

    def train_dataloader(self):
        return DataLoader(self.make_data(), batch_size=16, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.make_data(), batch_size=16)

    def make_data(self):
        return NoisyDigits(96 + 16 * (self.trainer.current_epoch // 2))


def make_persistent_model():
    """Return a model whose metrics Lightning saves in the weights: as they were, not reset yet."""
    model = make_drawing_model()
    model.accuracy.persistent(mode=True)
    return model


def make_logging_model():
    """Return a model that logs a mean and a metric over the epoch."""

    def training_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self.layers(batch[0]), batch[1])
        self.log("mean_loss", loss, on_step=False, on_epoch=True)
        self.average.update(loss)
        self.log("average", self.average, on_step=False, on_epoch=True)
        return loss

    model = make_model(training_step=training_step)
    model.average = MeanMetric()
    return model


@pytest.fixture
def logical(monkeypatch):
    """Return the words of a fit with two logical ranks in this process."""
    monkeypatch.setenv("LIGHTNING_D9M_LOGICAL_RANKS", "2")
    before = dict(os.environ)
    words = {"model": make_logging_model, "strategy": "ddp_d9m", "devices": 1}
    yield words | {"accumulate_grad_batches": 2}
    for name in os.environ.keys() - before:  # Lightning's launcher sets the address of the group
        del os.environ[name]
    torch.distributed.destroy_process_group()


BETWEEN = {"hook": "on_train_epoch_end", "epoch": 0, "batch": 6}
RELOADED = {"datamodule": Stages, "reload_dataloaders_every_n_epochs": 2}
LACKING = {
    "train_reload_epoch": (["train_reload_epoch"], None, {"epoch": 1}, RELOADED),
    "validation_reload_epoch": (["validation_reload_epoch"], None, {"epoch": 1}, RELOADED),
    "last loss": (["pending", "loss"], None, {"batch": 6}, {"max_epochs": 2}),
    "reset": (["reset"], [], BETWEEN, RUN | {"model": make_persistent_model}),
}


@pytest.mark.parametrize(("path", "empty", "place", "words"), LACKING.values(), ids=LACKING)
def test_a_piece_matters_at_some_places(fits, path, empty, place, words):
    straight = evidence(fits.check(place, **words))
    assert evidence(resume_edited(fits, (*RANK, *path), lambda _: empty, **words)) != straight
    if path == ["reset"]:
        (rank,) = torch.load(fits.folder / "0.ckpt", weights_only=True)["callbacks"][KEY]["ranks"]
        assert rank["rng"] is None  # an epoch seeds the generators
        assert rank["results"] == []  # and begins its sums


LOGICAL = {"logged": ([], "mean_loss"), "metric_states": ({}, "average")}
LOGICAL["gradients"] = ({}, "mean_loss")


def test_what_logical_ranks_have_kept_matters_within_an_epoch(fits, logical):
    straight = evidence(fits.check({"batch": 1}, **logical))
    for piece, (empty, scalar) in LOGICAL.items():
        place = (*RANK, piece)
        lacking = evidence(resume_edited(fits, place, lambda _, e=empty: e, **logical))
        values = [found["epoch", 1]["scalars"][scalar] for found in (straight, lacking)]
        assert values[0] != values[1], piece


ELSEWHERE = {
    ("train_reload_epoch",),
    ("validation_reload_epoch",),
    ("pending", "loss"),
    ("reset",),
    ("logged",),
    ("metric_states",),
    ("rng", "devices"),  # control/test_generators.py
    ("rng", "own"),
    ("inexact",),
}


def test_every_piece_is_tested(interrupted):
    """A piece that is added to a checkpoint needs a test that fails without it."""
    fits, _ = interrupted
    state = torch.load(fits.folder / "0.ckpt", weights_only=True)["callbacks"][KEY]
    (rank,) = state.pop("ranks")
    tested = {path[4:6] for path, _ in PIECES if path[: len(RANK)] == RANK}
    pieces = set()
    for name, value in rank.items():
        inside = name in {"rng", "generators", "pending"}
        pieces |= {(name, part) for part in value} if inside else {(name,)}
    tested |= {(path[0],) for path in tested}
    assert pieces - tested == ELSEWHERE
    assert all(rank[path[0]] for path in tested)
    assert set(rank["generators"]) == set(GENERATORS)
    told = {"seed", MANIFEST_KEY}  # to people; and see the test of a changed weight
    shared = {path[2] for path, *_ in (*PIECES, *REFUSED) if path[2:]}
    assert set(state) == shared - {"ranks"} | told


def test_a_validation_that_is_done_again_draws_and_measures_the_same(fits):
    hooks = ("on_validation_batch_end", "on_validation_end")
    places = [{"hook": hook, "batch": 3, "epoch": 0} for hook in hooks]
    run = RUN | {"validate": lambda: DataLoader(DrawingDigits(), batch_sampler=Curriculum())}
    fits.check(*places, **run)
