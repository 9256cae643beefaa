"""A run with state of every kind, pending, lost or changed late: exact, or it is said in time."""

import random
from functools import partial, reduce
from operator import getitem

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import (
    Callback,
    EarlyStopping,
    ModelCheckpoint,
    ModelPruning,
    WeightAveraging,
)
from resuming import (
    Curriculum,
    DrawingCollate,
    DrawingDigits,
    Fits,
    OwnOrder,
    agree,
    evidence,
    make_saver,
    stream,
)
from torch.utils.data import DataLoader, IterableDataset
from torchmetrics import CatMetric, MeanMetric, Metric, MetricCollection, SumMetric
from torchmetrics.classification import MulticlassAccuracy
from torchmetrics.wrappers import Running
from trainings import NoisyDigits, make_model

from lightning_d9m import D9mError, InexactResumeError
from lightning_d9m.engine.control import session
from lightning_d9m.integrations.lightning.resume.position import Position
from lightning_d9m.integrations.lightning.resume.saved_run import FORMAT
from lightning_d9m.integrations.lightning.saved_state import MANIFEST_KEY
from lightning_d9m.integrations.trainer.trainer_attributes import KEY

pytestmark = [
    pytest.mark.filterwarnings("ignore:Your `IterableDataset` has `__len__`:UserWarning"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory:UserWarning"),
]


class CountedNumbers(IterableDataset):
    """An endless stream that counts what it has read, one batch ahead of the training."""

    def __init__(self):
        self.read = 0

    def __iter__(self):
        digits = NoisyDigits()
        while True:
            self.read += 1
            yield digits[self.read % 96]


def skipping():
    """Return a model that ends each epoch after two batches."""
    model = make_model()
    model.on_train_batch_start = lambda batch, batch_idx: -1 if batch_idx == 2 else None
    return model


def averaging():
    """Return a model that averages its last bias in the module's own hook."""

    def average(self, outputs, batch, batch_idx):
        with torch.no_grad():
            self.average.lerp_(self.layers[4].bias, 0.1)

    model = make_model(on_train_batch_end=average)
    model.register_buffer("average", torch.zeros(10))
    return model


class Swap(Callback):
    """Validates averaged weights, as by a second set of them."""

    def on_validation_start(self, trainer, pl_module):
        self.trained = pl_module.layers[4].bias.data
        pl_module.layers[4].bias.data = self.trained * 0.9

    def on_validation_end(self, trainer, pl_module):
        pl_module.layers[4].bias.data = self.trained


BETWEEN = {"hook": "on_train_epoch_end", "epoch": 0, "batch": 6}
VALIDATING, VALIDATED = (
    {"hook": f"on_validation_{hook}end", "batch": 6} for hook in ("batch_", "")
)
SWAPPED = {"swapped": Swap, "averaged": partial(WeightAveraging, use_buffers=True)}
EXACT = {
    "a validation whose loaders come later": (
        [{"epoch": 2, "batch": 2}],
        {"check_val_every_n_epoch": 2, "max_epochs": 4}
        | {"validate": lambda: DataLoader(DrawingDigits(), batch_size=16)},
    ),
    "a stream of which nothing is left in the epoch": (
        [{"batch": 6}, VALIDATED],
        {"loader": lambda: DataLoader(CountedNumbers(), 16), "limit_train_batches": 6},
    ),
    "an epoch that a hook ends in every run": (
        [BETWEEN | {"batch": 2}],
        {"max_steps": 6, "max_epochs": -1, "model": skipping},
    ),
    "averages, at the end of an epoch": ([BETWEEN], {"model": averaging}),
    "weights that a validation swapped": ([VALIDATED], {"callbacks": lambda: [Swap()]}),
}


class DrawingCallback(Callback):
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
    """Draw, and measure in every way, as user code does."""
    noise = random.random() + float(np.random.rand()) + torch.rand(64, generator=self.noise)
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
    model.noise = torch.Generator().manual_seed(3)
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
STATE = ("callbacks", KEY)
RANK = (*STATE, "ranks", 0)
# The path of a piece of a checkpoint, what takes its place, and what is then said.
REFUSED = [
    (STATE, None, "has no lightning_d9m state"),
    (STATE, lambda _: [1], "has no lightning_d9m state"),
    ((*STATE, "format"), lambda n: n + 1, f"has format {FORMAT + 1}; this version reads {FORMAT}"),
    ((*STATE, "settings", "seed"), lambda n: 4, "saved with seed=4; now it is 3"),
    ((*STATE, "settings", "world_size"), lambda n: 2, "saved with world_size=2; now it is 1"),
    ((*STATE, "position", "step"), lambda n: n - 1, "at step 5, .* was saved at step 4"),
    ((*RANK, "generators", "train.0.dataset.rng"), None, r"only in this run: train\.0\.d.*\.rng"),
    ((*STATE, "inexact"), lambda old: ["A reason."], "- A reason."),
    (
        (*RANK, "gradients", "layers.0.bias"),
        lambda own: own[:1],
        r"a gradient of layers\.0\.bias of shape \(1,\) on this rank",
    ),
    (
        (*RANK, "rng"),
        None,
        r"state of the checkpoint is damaged: Object missing required field `rng` - at `\$.ranks",
    ),
    ((*STATE, "more"), lambda _: 1, "is damaged: Object contains unknown field `more`"),
    ((*STATE, "position"), lambda _: [], r"is damaged: Expected `object`.* at `\$.position`"),
    ((*RANK, "ledger", "check"), lambda _: 1, "is damaged: Expected `str`, got `int`"),
]


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    """Train, save in the middle of an epoch, between two micro-batches, and resume exactly."""
    fits = Fits(tmp_path_factory.mktemp("pieces"), session.restart_fits)
    fits.check({"batch": 5}, **RUN)
    return fits


@pytest.mark.filterwarnings("ignore:The ``compute`` method of metric:UserWarning")
@pytest.mark.parametrize(("path", "value", "message"), REFUSED)
def test_what_cannot_be_exact_is_said(interrupted, path, value, message):
    checkpoint = torch.load(interrupted.folder / "0.ckpt", weights_only=True)
    del checkpoint["callbacks"][KEY][MANIFEST_KEY]  # which would tell at once
    *above, last = path
    place = reduce(getitem, above, checkpoint)
    if value is None:
        del place[last]
    else:
        place[last] = value(place.get(last))
    torch.save(checkpoint, interrupted.folder / "edited.ckpt")
    with pytest.raises(D9mError, match=message):
        interrupted.fit(**RUN, resume=interrupted.folder / "edited.ckpt")


def make_persistent_model():
    """Return a model whose metrics Lightning saves in the weights: as they were, not reset yet."""
    model = make_drawing_model()
    model.accuracy.persistent(mode=True)
    return model


CURRICULUM = {"validate": lambda: DataLoader(DrawingDigits(), batch_sampler=Curriculum())}
EXACT |= {
    "metrics that the weights have": ([BETWEEN], RUN | {"model": make_persistent_model}),
    "all that is in an early validation": (
        [place | {"batch": 3, "epoch": 0} for place in (VALIDATING, VALIDATED)],
        RUN | CURRICULUM,
    ),
}


@pytest.mark.parametrize(("places", "words"), EXACT.values(), ids=EXACT)
def test_a_run_is_resumed_where_a_piece_matters(fits, places, words):
    fits.check(*places, **words)


def test_pruned_weights_that_are_saved_without_their_masks_are_named(fits):
    words = {"callbacks": lambda: [ModelPruning("l1_unstructured", amount=0.2)]}
    fits.refuse(r"lacks .*_orig.*, which changes in the fit", at={"batch": 2}, **words)


@pytest.mark.parametrize("make", SWAPPED.values(), ids=SWAPPED)
def test_weights_that_a_validation_has_swapped_are_named(fits, make):
    """Lightning's callback swaps the values of parameters, which stay the same tensors."""
    named = r"a validation that had changed layers\.\d\."
    fits.refuse(named, at=VALIDATING, callbacks=lambda: [make()])


@pytest.mark.parametrize("every", [2, None])
def test_it_is_said_when_the_first_checkpoint_is_saved_within_an_epoch(fits, caplog, every):
    """Before a run trains on that could not be resumed there; not where all are between epochs."""
    saver = ModelCheckpoint(fits.folder, every_n_train_steps=every)
    fits.fit(loader=stream, extra=[saver], enable_checkpointing=True, max_epochs=1)
    assert caplog.text.count("cannot be resumed exactly") == (1 if every else 0)
    assert ("StatefulDataLoader" in caplog.text) == bool(every)


def log_late(self, outputs, batch, batch_idx):
    """Log what counts in the mean, and what a resumed run does not log again."""
    self.log("late", float(batch_idx), on_epoch=True)


LATE = {
    "a buffer": (averaging, "average"),
    "a value": (
        partial(make_model, on_train_batch_end=log_late),
        "the logged value 'late' of on_train_batch_end",
    ),
}


@pytest.mark.parametrize(("model", "name"), LATE.values(), ids=LATE)
def test_what_a_hook_of_the_module_changes_after_a_save_is_named(fits, caplog, model, name):
    """In the log; a later checkpoint, which overwrites the first, is refused."""

    class Saver(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, data, batch_idx):
            if batch_idx in (2, 3) and trainer.current_epoch == 0:
                trainer.save_checkpoint(fits.checkpoint)

    with caplog.at_level("INFO"):
        fits.fit(model=model, extra=[Saver()])
    assert "just saved cannot be resumed exactly" in caplog.text
    with pytest.raises(InexactResumeError, match=f"on_train_batch_end, changes {name}"):
        fits.resume(model=model)
    if name == "average":  # the same hook is not late for what is saved after a validation
        saver = make_saver(fits.checkpoint, hook="on_validation_end", batch=6, stop=False)
        straight = fits.fit(model=model, extra=[Saver(), saver], enable_checkpointing=True)
        agree(straight, fits.resume(model=model))


STEPS = {"max_epochs": -1, "max_steps": 15}


class Stopping(Callback):
    """Asks the Trainer to stop in the second batch of the fit."""

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        trainer.should_stop = trainer.global_step == 2


def ending():
    """Return a model that acts at the end of an epoch."""
    return make_model(on_train_epoch_end=lambda self: self.layers[0].weight.data.zero_())


CUT = {
    "a callback": (
        {"max_steps": 2, "callbacks": lambda: [EarlyStopping("train_loss", patience=9)]},
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


def test_a_stop_within_an_epoch_is_restored(fits):
    """With the end of the epoch that follows it; a checkpoint before the validation is refused."""
    words = {"callbacks": lambda: [Stopping()]}
    fits.check({"epoch": 0, "hook": "on_validation_end"}, **words)
    assert fits.trainer.global_step == 2
    fits.refuse("was saved after trainer.should_stop was set", at={"epoch": 0}, **words)


def test_a_finished_run_stays_finished(fits, caplog):
    words = {"callbacks": lambda: [EarlyStopping("val_loss", mode="max", patience=1)]}
    at = {"hook": "on_train_epoch_end", "batch": 6, "stop": False}
    fits.fit(**words, extra=[make_saver(fits.checkpoint, **at)], enable_checkpointing=True)
    steps, weights = fits.trainer.global_step, fits.model.layers[0].weight.detach().clone()
    fits.resume(**words)
    assert fits.trainer.global_step == steps == 12
    assert torch.equal(fits.model.layers[0].weight, weights)
    assert "this one is finished, too" in caplog.text
    with pytest.warns(UserWarning, match="and this one trains longer"):
        fits.resume(**words, words={"on_inexact_resume": "warn"})
    assert fits.trainer.global_step == 18


def ordered(groups):
    """Return a model each of which has the next order of parameters in groups of its optimizer."""

    def configure(self):
        named, order = dict(self.named_parameters()), next(groups)
        taken = [[named.pop(name) for name in group] for group in order]
        return torch.optim.Adam([{"params": own} for own in [*taken, [*named.values()]]], lr=0.01)

    return lambda: make_model(configure_optimizers=configure)


BIASES = ["layers.0.bias", "layers.1.bias", "layers.1.weight"]
SETS = [[BIASES], [BIASES[::-1]], [[*BIASES[1:], BIASES[0]]]]


def test_the_state_of_an_optimizer_follows_the_names_of_parameters(fits):
    """As programs make groups from sets, which have another order in each process."""
    fits.check({}, {"hook": "on_train_epoch_end", "batch": 6}, model=ordered(iter(SETS)))
    fits.interrupt(model=ordered(iter(SETS)))
    with pytest.raises(
        InexactResumeError, match=r"groups of the optimizer 0 \(\[3, 3\] and \[2, 4\]"
    ):
        fits.resume(model=ordered(iter([[BIASES[:2]]])))


def extend(self):
    """Let the fit train longer than the Trainer was told."""
    if self.current_epoch == 0:
        self.trainer.fit_loop.max_epochs = 3


def test_a_limit_that_a_hook_has_changed_is_kept(fits):
    end = {"hook": "on_train_epoch_end", "batch": 6}
    fits.check({}, end, max_epochs=2, model=partial(make_model, on_train_epoch_end=extend))


def save_and_draw(self, checkpoint):
    """Draw, and count the saves."""
    checkpoint["preview"] = torch.rand(2), random.random()
    self.saves = getattr(self, "saves", 0) + 1
    with torch.no_grad():
        self.layers[0].bias += self.saves


def test_hooks_that_save_change_what_is_resumed_and_draw_apart(fits):
    drawing = partial(
        make_model, on_save_checkpoint=lambda self, saved: saved.update(x=torch.rand(2))
    )
    words = {"model": drawing, "enable_checkpointing": True}
    often = fits.fit(**words, extra=[make_saver(fits.checkpoint, stop=False)])
    assert evidence(often) == evidence(fits.fit(model=drawing))
    fits.check({}, model=partial(make_model, on_save_checkpoint=save_and_draw))


PLATEAU = {"interval": "step", "reduce_on_plateau": True, "monitor": "val_loss", "frequency": 2}


def plateau(self):
    optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.7)
    return [optimizer], [PLATEAU | {"scheduler": scheduler}]


LONGER = {
    "in a later epoch": ({}, 8),
    "accumulation": ({"accumulate_grad_batches": 2}, 4),
    "a validation at that step": (
        {"val_check_interval": 2, "model": partial(make_model, configure_optimizers=plateau)},
        4,
    ),
    "loaders that are reloaded": ({"reload_dataloaders_every_n_epochs": 1}, 8),
}


@pytest.mark.parametrize(("words", "steps"), LONGER.values(), ids=LONGER)
def test_an_epoch_that_max_steps_cut_short_is_continued(fits, words, steps):
    """The checkpoint is saved by callbacks in the last step, and by the Trainer after the fit."""
    straight = fits.fit(**STEPS | words)
    words = STEPS | words | {"enable_checkpointing": True}
    savers = {"within": {"every_n_train_steps": steps}, "end": {}}
    words["callbacks"] = lambda: [
        ModelCheckpoint(fits.folder, name, **when) for name, when in savers.items()
    ]
    fits.fit(**words | {"max_steps": steps})
    fits.trainer.save_checkpoint(fits.checkpoint)
    # Renamed, as a resumed run overwrites the files of its callbacks.
    paths = [(fits.folder / f"{name}.ckpt").rename(fits.folder / f"kept-{name}") for name in savers]
    for path in (*paths, fits.checkpoint):
        agree(straight, fits.fit(**words, resume=path))


def test_a_fit_without_steps_left_loads_any_checkpoint(fits):
    few = STEPS | {"max_steps": 2}
    fits.fit(**few)
    fits.trainer.save_checkpoint(fits.checkpoint)
    fits.resume(**few)
    assert fits.trainer.global_step == 2


WITHIN = {"batch": 3}
UNVALIDATED = {"limit_val_batches": 0, "max_epochs": 2}


def manual(zero=lambda module: None):
    """Return a model that steps in each batch, and zeroes as it is told before the next."""

    def step(self, batch, batch_idx):
        zero(self)
        self.manual_backward(torch.nn.functional.cross_entropy(self.layers(batch[0]), batch[1]))
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


@pytest.mark.parametrize(
    ("make", "zero"), [(manual, pass_by), (automatic, halve), (manual, fill), (automatic, remove)]
)
def test_gradients_to_which_a_module_may_add_are_resumed(fits, make, zero):
    fits.check(WITHIN, BETWEEN, model=lambda: make(zero), **UNVALIDATED)


def sparse():
    """Return a manual model that zeroes its sparse gradients after every second batch."""

    def step(self, batch, batch_idx):
        self.manual_backward(self.table(batch[1]).square().sum())
        self.optimizers().step()
        if batch_idx % 2:
            self.optimizers().zero_grad()

    def configure_optimizers(self):
        return torch.optim.SparseAdam(self.table.parameters())

    model = make_model(training_step=step, configure_optimizers=configure_optimizers)
    model.automatic_optimization = False
    model.table = torch.nn.Embedding(10, 3, sparse=True)
    return model


def test_sparse_gradients_are_kept(fits):
    fits.check(WITHIN, model=sparse, **UNVALIDATED)


class Shaking(Callback):
    """Draws when an epoch starts."""

    def on_train_epoch_start(self, trainer, module):
        with torch.no_grad():
            module.layers[4].bias += 0.01 * (random.random() + np.random.rand() + torch.rand(10))


def test_what_a_callback_draws_when_an_epoch_starts_does_not_depend_on_its_place(fits):
    places = [{"hook": "on_train_epoch_end", "epoch": epoch, "batch": 6} for epoch in (0, 1)]
    words = {"earlier": lambda: [Shaking()], "reload_dataloaders_every_n_epochs": 2}
    fits.check(*places, **words)
    last = fits.fit(**words | {"earlier": list, "callbacks": lambda: [Shaking()]})
    assert evidence(last) == evidence(fits.fit(**words))


class Checked(Callback):
    """Says when a sanity check runs, and counts on it."""

    def on_sanity_check_end(self, trainer, module):
        CHECKS.append(trainer)
        with torch.no_grad():
            module.layers[4].bias += 0.01


CHECKS = []


def test_a_fit_that_resumes_makes_no_sanity_check(fits):
    words = {"callbacks": lambda: [Checked()], "num_sanity_val_steps": 2}
    fits.check({"batch": 2}, {"hook": "on_train_epoch_end", "batch": 6}, **words)
    assert (len(CHECKS), fits.trainer.num_sanity_val_steps) == (1, 2)
    CHECKS.clear()


def test_a_fit_that_fails_before_it_has_begun_saves_its_checkpoint(fits, monkeypatch):
    def save(part):
        part.trainer.save_checkpoint(fits.checkpoint)

    monkeypatch.setattr(Position, "begin", save)
    fits.fit(max_epochs=1)
    assert KEY in torch.load(fits.checkpoint, weights_only=True)["callbacks"]
