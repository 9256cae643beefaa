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

from lightning_d9m import InexactResumeError

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
HELD = iter(range(9))


@pytest.fixture(autouse=True)
def fresh():
    """Let the next fit begin with the variables of a new process."""
    globals()["STREAM"] = zip(iter([1, 2, 3] * 9), [0] * 27, strict=False)
    InClass.count = OTHER.count = advance.calls = 0
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
            module.layers[4].bias.add_(1e-3 * float(number))


class InAttributes(Steering):
    """Keeps numbers, lists, tensors and generators, private ones too."""

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
        total = sum(self.losses) + self.by_name["x"] + float(sum(self.last)) + self.late
        self.steer(module, total + self._count)


class InClass(Steering):
    """Keeps a number in its class, and others in the variables of its file."""

    count = 0

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        type(self).count += 1
        COUNTS["batches"] += 2
        self.steer(module, self.count * COUNTS["batches"])


class Empty:
    """Has no attributes, as a sentinel."""

    __slots__ = ()


EMPTY = Empty()


def advance(numbers=[]):  # noqa: B006 - what a program may do
    """Count in an attribute, a default and a variable of another file."""
    advance.calls += 1
    OTHER.count += 2
    numbers.append(advance.calls * OTHER.count)
    return sum(numbers)


class InFunction(Steering):
    """Calls a function that keeps numbers."""

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.steer(module, advance())


class Pool:
    """Stands for an object of a library."""

    __module__ = "json.pool"

    def __init__(self, *parts):
        self.kept, self.parts = [], parts
        self.mean = torch.zeros(2)


class InLibrary(Steering):
    """Keeps objects of a library: a list, and a tensor in another of its objects."""

    def __init__(self):
        self.pool = Pool(Pool())

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.pool.kept.append(batch[0].mean())
        self.pool.parts[0].mean.lerp_(batch[0].mean(), 0.2)
        self.steer(module, sum(self.pool.kept) + self.pool.parts[0].mean[0])


class InModule(Steering):
    """Keeps an average of the weights in a module."""

    def __init__(self):
        self.average = nn.Linear(64, 10)
        self.average.requires_grad_(requires_grad=False)
        nn.init.zeros_(self.average.bias)
        nn.init.zeros_(self.average.weight)

    def on_validation_end(self, trainer, module):
        self.average.bias.data.lerp_(module.layers[4].bias.data, 0.5)

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.steer(module, self.average.bias.sum())


class Made(Steering):
    """Makes an object in a hook, and changes it."""

    def on_fit_start(self, trainer, module):
        self.table = {"numbers": [0], "owner": module}

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.table["numbers"][0] += 1
        self.steer(module, self.table["numbers"][0])


def in_closure():
    """Return a callback of Lightning's whose function keeps a number."""
    count = 0

    def start(trainer, module, batch, batch_idx):
        nonlocal count
        count += 1
        Steering().steer(module, count)

    return LambdaCallback(on_train_batch_start=start)


KINDS = [InAttributes, InClass, InFunction, InLibrary, InModule, Made, in_closure]
HOOKS = ("on_validation_batch_end", "on_validation_end", "on_train_epoch_end")
PLACES = [{"batch": 2}, *({"hook": hook, "batch": 6} for hook in HOOKS)]


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_callback_keeps_in_any_way_is_restored(fits, kind):
    fits.check(*PLACES, callbacks=lambda: [kind()])


def test_what_a_module_and_its_parts_keep_is_restored(fits):
    fits.check(*PLACES, model=counting)


def counting():
    """Return a model with state in attributes, lists of a validation, and a frozen part."""

    def on_train_batch_start(self, batch, batch_idx):
        self.steps = getattr(self, "steps", 0) + 1
        self.layers[1].rate = self.steps / 10

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
            self.layers[5].bias.add_(1e-3 * self.layers[1].rate + 1e-6 * getattr(self, "total", 0))

    hooks = (on_train_batch_start, on_train_epoch_start, validation_step, on_validation_epoch_end)
    named = {hook.__name__: hook for hook in (*hooks, on_before_optimizer_step)}
    model = make_model(**named)
    model.layers.insert(3, nn.Dropout(0.1))
    return model


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


def test_what_optimizers_and_schedulers_keep_is_restored(fits):
    def configure_optimizers(self):
        optimizer = Lookahead(self.parameters())
        return [optimizer], [{"scheduler": Fading(optimizer), "interval": "step"}]

    fits.check(*PLACES, model=lambda: make_model(configure_optimizers=configure_optimizers))


def halve(module, inputs, output):
    return output / 2


HOOKED = {
    "module": lambda layer: layer.register_forward_hook(halve),
    "backward": lambda layer: layer.register_full_backward_pre_hook(lambda _, own: own),
    "parameter": lambda layer: layer.weight.register_hook(lambda own: own / 2),
    "accumulated": lambda layer: layer.bias.register_post_accumulate_grad_hook(lambda own: None),
}


@pytest.mark.parametrize("register", HOOKED.values(), ids=HOOKED)
def test_a_hook_that_is_registered_in_the_fit_is_refused_by_name(fits, register):
    def start(trainer, module):
        if trainer.current_epoch == 1:
            register(module.layers[4])

    words = {"callbacks": lambda: [LambdaCallback(on_train_epoch_start=start)]}
    fits.interrupt(**words, at={"batch": 2})
    with pytest.raises(InexactResumeError, match=r"model\.layers\.4\.hooks\(\) changes in the fit"):
        fits.resume(**words)


def test_variables_of_packages_do_not_matter(fits):
    def start(*_):
        PACKAGE.count += 1

    fits.check({"batch": 2}, callbacks=lambda: [LambdaCallback(on_train_batch_start=start)])
    saved = torch.load(fits.folder / "0.ckpt", weights_only=True)["callbacks"]["lightning_d9m"]
    assert not [path for path in saved["ranks"][0]["program"] if "other_package" in path]


def test_hooks_that_are_there_at_first_or_in_a_step_do_not_matter(fits):
    def start(trainer, module, stage):
        module.layers[0].register_forward_hook(halve)

    def step(trainer, module, *_):
        module.layers[4].register_forward_hook(halve).remove()

    fits.check(*PLACES, callbacks=lambda: [LambdaCallback(setup=start, on_train_batch_start=step)])


class Opaque(Callback):
    """Keeps an object that has no plain form."""

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.records = [LightningModule.__new__]
        self.objects = [*getattr(self, "objects", []), Made()]


class Kept:
    """Stands for an object of a library with slots."""

    __module__ = "torch.kept"
    __slots__ = ("number",)


def advance_variable(callback):
    return next(STREAM)[0]


def change_buffer(callback):
    callback.kept[0] += 1
    return callback.kept[0]


def change_slot(callback):
    callback.kept.number = getattr(callback.kept, "number", 0) + 1
    return callback.kept.number


class Keeping(Steering):
    """Keeps an object whose state no attribute shows."""

    def __init__(self, kept, change):
        self.kept, self.change = kept, change

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        LOG.debug("batch")
        self.steer(module, self.change(self))


UNSEEN = {
    "variable": (lambda: None, advance_variable, r"test_program_state\.STREAM changes"),
    "iterator": (lambda: enumerate([5, 6, 7] * 9), lambda own: next(own.kept)[1], "kept changes"),
    "bytes": (lambda: bytearray(1), change_buffer, "kept changes"),
    "slots": (Kept, change_slot, "kept changes"),
}


@pytest.mark.parametrize(("make", "change", "named"), UNSEEN.values(), ids=UNSEEN)
def test_what_no_attribute_shows_is_refused_by_name(fits, make, change, named):
    words = {"callbacks": lambda: [Keeping(make(), change)]}
    fits.interrupt(**words, at={"batch": 2})
    with pytest.raises(InexactResumeError, match=named):
        fits.resume(**words)


HARMLESS = {
    "lock": threading.Lock,
    "ended": lambda: [own := (one for one in ()), list(own)][0],
    "queue": queue.SimpleQueue,
}


@pytest.mark.parametrize("make", HARMLESS.values(), ids=HARMLESS)
def test_objects_without_attributes_that_stay_as_they_are_do_not_matter(fits, make):
    fits.check({"batch": 2}, callbacks=lambda: [Keeping(make(), lambda _: 1)])


def test_a_method_that_a_wrapper_has_put_back_does_not_matter(fits):
    def wrap(callback):
        callback.steer = callback.steer
        return 1

    fits.check({"batch": 2}, callbacks=lambda: [Keeping(None, wrap)])


def test_a_generator_that_nothing_has_drawn_from_is_restored(fits):
    """It may be seeded by the operating system, so that another process has another one."""

    def draw(callback):
        return callback.kept.random() if callback.drawn else 0

    def make(seed):
        callback = Keeping(random.Random(seed), draw)
        callback.drawn = False
        return [callback, LambdaCallback(on_train_epoch_start=lambda *_: start(callback))]

    def start(callback):
        callback.drawn = True

    straight = fits.fit(callbacks=lambda: make(1))
    fits.interrupt(callbacks=lambda: make(1), at={"batch": 2, "epoch": 0})
    agree(straight, fits.resume(callbacks=lambda: make(2)))


def test_what_has_no_plain_form_is_refused_by_name(fits):
    words = {"callbacks": lambda: [Opaque()]}
    fits.interrupt(**words, at={"batch": 2})
    with pytest.raises(InexactResumeError, match=r"callbacks\.Opaque\.objects changes in the fit"):
        fits.resume(**words)


class Large(InModule):
    """Keeps more than a checkpoint takes, and saves it itself if ``saves``."""

    saves = True

    def __init__(self):
        super().__init__()
        self.table = torch.zeros(2**23)

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.table.data[batch_idx] += 1
        self.table.add_(0)
        self.steer(module, self.table[:8].sum())

    def state_dict(self):
        return {"table": self.table.clone()} if self.saves else {}

    def load_state_dict(self, state_dict):
        self.table = state_dict.get("table", self.table)


class Lost(Large):
    """Saves nothing."""

    saves = False


def test_large_values_are_left_to_the_callback_or_refused(fits):
    fits.check({"batch": 2}, callbacks=lambda: [Large()])
    assert (fits.folder / "0.ckpt").stat().st_size < 2**26
    words = {"callbacks": lambda: [Lost()]}
    fits.interrupt(**words, at={"batch": 2})
    with pytest.raises(InexactResumeError, match=r"Lost\.table changes in the fit, and has 33554"):
        fits.resume(**words)


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
