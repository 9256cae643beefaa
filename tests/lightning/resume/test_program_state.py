"""State that a program keeps in any way is exact after a resume, or the resume is refused."""

import logging
import queue
import random
import sys
import threading
from collections import Counter, deque
from pathlib import Path
from types import ModuleType

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import Callback, LambdaCallback, ModelCheckpoint
from resuming import Fits, agree
from torch import nn
from trainings import make_model

COUNTS = {"batches": 0}
# A file of the program that this one imports.
OTHER = sys.modules["other_file"] = ModuleType("other_file")
OTHER.__file__ = __file__
# A package of another environment that is on the path, of which nothing is the program's.
PACKAGE = sys.modules["other_package"] = ModuleType("other_package")
PACKAGE.__file__ = "/other/lib/python3/dist-packages/other_package.py"
PACKAGE.count = 0
STREAM = iter(())
LOG = logging.getLogger(__name__)


@pytest.fixture(autouse=True)
def fresh():
    """Let the next fit begin with the variables of a new process."""
    globals()["STREAM"] = zip(iter([1, 2, 3] * 9), [0] * 27, strict=False)
    Numbers.count = OTHER.count = advance.calls = 0
    advance.__defaults__[0].clear()
    COUNTS.clear()
    COUNTS["batches"] = 0


@pytest.fixture
def fits(tmp_path, new_process):
    def begin():
        fresh.__wrapped__()
        new_process()

    return Fits(tmp_path, begin)


class Steering(Callback):
    """Scales the weights by what it keeps, so that a lost state changes the bits."""

    def steer(self, module, number):
        with torch.no_grad():
            module.layers[-1].bias.add_(1e-3 * float(number))


# A sentinel without attributes.
EMPTY = type("Empty", (), {"__slots__": ()})()


def advance(numbers=[]):  # noqa: B006 - what a program may do
    """Count in an attribute, a default and a variable of another file."""
    advance.calls += 1
    OTHER.count += 2
    numbers.append(advance.calls * OTHER.count)
    return sum(numbers)


class Numbers(Steering):
    """Keeps numbers, lists, tensors and generators in attributes, its class, files, a function."""

    count = 0

    def __init__(self):
        self._count, self.losses, self.by_name = 0, [], Counter()
        self.average, self.last, self.noise = torch.zeros(()), deque(maxlen=3), random.Random(1)

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self._count += 1
        self.losses.append(float(self._count) / 7)
        self.by_name["x"] += 1
        self.average.data.lerp_(torch.tensor(self.losses[-1]), 0.2)
        self.last.append(self.average.clone())
        self.late = getattr(self, "late", 0) + self.noise.random()
        type(self).count += 1
        COUNTS["batches"] += 2
        self.steer(module, sum(self.losses) + self.by_name["x"] + float(sum(self.last)))
        self.steer(module, self.late + self._count + self.count * COUNTS["batches"] + advance())


class Pool:
    """Stands for an object of a library."""

    __module__ = "json.pool"

    def __init__(self, *parts):
        self.kept, self.counts, self.parts = [], {}, parts
        self.mean = torch.zeros(2)


class Objects(Steering):
    """Keeps objects of a library, an average, what a hook makes, and a count in the Trainer."""

    def __init__(self):
        self.pool = Pool(Pool())  # a list, a dict, and a tensor in another object
        self.average = nn.Linear(64, 10)
        self.average.requires_grad_(requires_grad=False)
        nn.init.zeros_(self.average.bias)
        nn.init.zeros_(self.average.weight)

    def on_fit_start(self, trainer, module):
        self.table = {"numbers": [0], "owner": module}

    def on_validation_end(self, trainer, module):
        self.average.bias.data.lerp_(module.layers[-1].bias.data, 0.5)

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.pool.kept.append(batch[0].mean())
        self.pool.parts[0].mean.lerp_(batch[0].mean(), 0.2)
        self.pool.counts["batches"] = self.pool.counts.get("batches", 0) + 1
        trainer.seen = getattr(trainer, "seen", 0) + 1
        self.steer(module, self.pool.counts["batches"] + trainer.seen)
        self.table["numbers"][0] += 1
        self.steer(module, sum(self.pool.kept) + self.pool.parts[0].mean[0])
        self.steer(module, self.average.bias.sum() + self.table["numbers"][0])


def in_closure():
    """Return a callback of Lightning's whose function keeps a number."""
    count = 0

    def start(trainer, module, batch, batch_idx):
        nonlocal count
        count += 1
        Steering().steer(module, count)

    return LambdaCallback(on_train_batch_start=start)


class Lookahead(torch.optim.SGD):
    """Keeps a number and slow weights in attributes that are not in its state."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.01)
        self.count = 0
        self.slow = [own.detach().clone() for own in self.param_groups[0]["params"]]

    @torch.no_grad()
    def step(self, closure=None):
        loss = super().step(closure)
        self.count += 1
        for slow, own in zip(self.slow, self.param_groups[0]["params"], strict=True):
            if self.count % 4 == 0:
                own.copy_(slow.lerp_(own, 0.5))
        return loss


class Fading(torch.optim.lr_scheduler.LRScheduler):
    """Keeps a factor that is not in its state."""

    factor = 1.0

    def state_dict(self):
        return {name: own for name, own in super().state_dict().items() if name != "factor"}

    def get_lr(self):
        self.factor *= 0.9
        return [rate * self.factor for rate in self.base_lrs]


def counting():
    """Return a model with state in attributes, lists of a validation, optimizer and scheduler."""

    def on_train_batch_start(self, batch, batch_idx):
        self.steps = getattr(self, "steps", 0) + 1
        self.layers[1].rate = self.steps / 10
        self.hparams["scale"] = self.hparams.get("scale", 1) * 1.1

    def on_train_epoch_start(self):  # which a resume within an epoch does not call again
        self.layers[3].eval()

    def validation_step(self, batch, batch_idx):
        self.outputs = [*getattr(self, "outputs", []), self.layers(batch[0]).sum()]

    def on_validation_epoch_end(self):
        self.log("val", torch.stack(self.outputs).sum())
        self.total = getattr(self, "total", 0.0) + float(self.outputs[-1])
        self.outputs.clear()

    def on_before_optimizer_step(self, optimizer):
        with torch.no_grad():
            kept = self.layers[1].rate + self.hparams["scale"]
            self.layers[5].bias.add_(1e-3 * kept + 1e-6 * getattr(self, "total", 0))

    def configure_optimizers(self):
        optimizer = Lookahead(self.parameters())
        return [optimizer], [{"scheduler": Fading(optimizer), "interval": "step"}]

    hooks = (on_train_batch_start, on_train_epoch_start, validation_step, on_validation_epoch_end)
    hooks += (on_before_optimizer_step, configure_optimizers)
    model = make_model(**{hook.__name__: hook for hook in hooks})
    model.layers.insert(3, nn.Dropout(0.1))
    return model


HOOKS = ("on_validation_batch_end", "on_validation_end", "on_train_epoch_end")
PLACES = [{"batch": 2}, *({"hook": hook, "batch": 6} for hook in HOOKS)]


def test_what_a_program_keeps_in_any_way_is_restored(fits):
    """Each of its callbacks, modules, optimizers and schedulers changes the weights by its own."""
    fits.check(*PLACES, model=counting, callbacks=lambda: [Numbers(), Objects(), in_closure()])


class Kept:
    """Stands for an object of a library with slots."""

    __module__ = "torch.kept"
    __slots__ = ("number",)


def change_slot(kept):
    kept.number = getattr(kept, "number", 0) + 1


class Keeping(Callback):
    """Keeps an object whose state no attribute shows, and changes it in each batch."""

    def __init__(self, kept, change):
        self.kept, self.change = kept, change

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        LOG.debug("batch")
        self.change(self.kept)


class Opaque(Callback):
    """Keeps an object that has no plain form."""

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.records = [LightningModule.__new__]
        self.objects = [*getattr(self, "objects", []), Objects()]


def halve(module, inputs, output):
    return output / 2


HOOKED = {
    2: lambda layer: layer.register_forward_hook(halve),
    3: lambda layer: layer.register_full_backward_pre_hook(lambda _, own: own),
    0: lambda layer: layer.weight.register_hook(lambda own: own / 2),
    4: lambda layer: layer.bias.register_post_accumulate_grad_hook(lambda own: None),
}


def register(trainer, module):
    """Register hooks in the fit."""
    if trainer.current_epoch == 1:
        for number, own in HOOKED.items():
            own(module.layers[number])


def test_what_no_attribute_shows_is_refused_by_name(fits):
    def make():
        return [
            Keeping(None, lambda _: next(STREAM)),
            Keeping(enumerate([5, 6, 7] * 9), next),
            Keeping(bytearray(b"ab"), lambda kept: kept.reverse()),
            Keeping(Kept(), change_slot),
            Opaque(),
            LambdaCallback(on_train_epoch_start=register),
        ]

    said = str(fits.refuse("changes in the fit", callbacks=make, at={"batch": 2}))
    for path in ("Keeping#1.kept", "Keeping#2.kept", "Keeping#3.kept", "Opaque.objects"):
        assert f"callbacks.{path} changes in the fit" in said
    for number in HOOKED:
        assert f"model.layers.{number}.hooks() changes in the fit" in said
    assert "test_program_state.STREAM changes" in said


def test_what_stays_as_it_is_or_is_not_the_programs_does_not_matter(fits):
    """Locks, ended iterators, queues, variables of packages, methods that a wrapper has put back.

    And hooks of modules that are there at first, or only in a step.
    """

    def count(*_):
        PACKAGE.count += 1

    def start(trainer, module, stage):
        module.layers[0].register_forward_hook(halve)

    def step(trainer, module, *_):
        module.layers[4].register_forward_hook(halve).remove()
        module.on_fit_end = module.on_fit_end

    def make():
        ended = (one for one in ())
        list(ended)
        kept = (threading.Lock(), ended, queue.SimpleQueue())
        return [
            *(Keeping(own, lambda _: None) for own in kept),
            LambdaCallback(on_train_batch_start=count),
            LambdaCallback(setup=start, on_train_batch_start=step),
        ]

    fits.check(*PLACES, callbacks=make)
    saved = torch.load(fits.folder / "0.ckpt", weights_only=True)["callbacks"]["lightning_d9m"]
    assert not [path for path in saved["ranks"][0]["program"] if "other_package" in path]


def test_a_generator_that_nothing_has_drawn_from_is_restored(fits):
    """It may be seeded by the operating system, so that another process has another one."""

    class Drawing(Steering):
        def __init__(self, seed):
            self.noise, self.drawn = random.Random(seed), False

        def on_train_epoch_start(self, trainer, module):
            self.drawn = True

        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            self.steer(module, self.noise.random() if self.drawn else 0)

    def make(seed):
        return [Drawing(seed)]

    straight = fits.fit(callbacks=lambda: make(1))
    fits.interrupt(callbacks=lambda: make(1), at={"batch": 2, "epoch": 0})
    agree(straight, fits.resume(callbacks=lambda: make(2)))


class Large(Steering):
    """Keeps more than a checkpoint takes, and saves it itself if it should."""

    def __init__(self, saves):
        self.table, self.saves = torch.zeros(2**23), saves

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.table.data[batch_idx] += 1
        self.table.add_(0)
        self.steer(module, self.table[:8].sum())

    def state_dict(self):
        return {"table": self.table.clone()} if self.saves else {}

    def load_state_dict(self, state_dict):
        self.table = state_dict.get("table", self.table)


def test_large_values_are_left_to_the_callback_or_refused(fits):
    fits.check({"batch": 2}, callbacks=lambda: [Large(saves=True)])
    assert (fits.folder / "0.ckpt").stat().st_size < 2**26
    words = {"callbacks": lambda: [Large(saves=False)]}
    fits.refuse(r"Large\.table changes in the fit, and has 33554", at={"batch": 2}, **words)


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_a_run_that_saves_to_another_folder_keeps_its_own_best_checkpoints(fits, tmp_path):
    def fit(folder, epochs, resume=None):
        saving = ModelCheckpoint(
            tmp_path / folder, monitor="step", mode="max", save_top_k=2, every_n_train_steps=2
        )
        words = {"enable_checkpointing": True, "max_epochs": epochs, "resume": resume}
        fits.fit(callbacks=lambda: [saving], **words)
        return {Path(path).name for path in saving.best_k_models}

    fit("first", 1)
    found = fit("second", 2, tmp_path / "first" / "epoch=0-step=6.ckpt")
    assert found == {"epoch=1-step=10.ckpt", "epoch=1-step=12.ckpt"}
