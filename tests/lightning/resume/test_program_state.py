"""State that a program or any callback keeps in any way is exact after a resume, or is refused."""

import logging
import queue
import random
import sys
import threading
from collections import Counter, deque
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule, callbacks
from lightning.pytorch.callbacks import Callback, LambdaCallback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from resuming import Fits, agree, make_saver
from torch import nn
from torch.utils.data import DataLoader
from trainings import NoisyDigits, make_loader, make_model

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
# Within accumulation, within a validation, after it, and between epochs.
PLACES = [{"batch": 3}, *({"hook": hook, "batch": 6} for hook in HOOKS)]


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
            Keeping(bytearray(1), lambda kept: kept.append(kept.pop() + 1)),
            Keeping(Kept(), change_slot),
            Opaque(),
        ]

    said = str(fits.refuse("changes in the fit", callbacks=make, at={"batch": 2}))
    for path in ("Keeping#1.kept", "Keeping#2.kept", "Keeping#3.kept", "Opaque.objects"):
        assert f"callbacks.{path} changes in the fit" in said
    assert "test_program_state.STREAM" in said


def test_a_hook_that_the_fit_registers_is_refused_by_name(fits):
    words = {"callbacks": lambda: [LambdaCallback(on_train_epoch_start=register)]}
    said = str(fits.refuse("changes in the fit", at={"batch": 2}, **words))
    for number in HOOKED:
        assert f"model.layers.{number}.hooks() changes in the fit" in said


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


quietly = pytest.mark.filterwarnings("ignore::UserWarning")


class Finetuning(callbacks.BaseFinetuning):
    """Trains the first layers from the second epoch on."""

    def freeze_before_training(self, module):
        self.freeze(module.layers[0])

    def finetune_function(self, module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(module.layers[0], optimizer, lr=0.01)


def with_backbone():
    """Return a model whose optimizer begins without its first layers."""

    def configure(self):
        return torch.optim.Adam([p for p in self.parameters() if p.requires_grad], lr=0.01)

    model = make_model(configure_optimizers=configure)
    model.backbone = model.layers[0]
    return model


def reporting(folder):
    """Return the callbacks that report, save, stop or count, which do not disturb each other."""
    return [
        callbacks.EarlyStopping("train_loss", patience=9),
        callbacks.ModelCheckpoint(folder, "kept"),
        callbacks.OnExceptionCheckpoint(folder),
        callbacks.Timer(duration={"hours": 1}),
        callbacks.ModelSummary(),
        callbacks.RichModelSummary(),
        callbacks.TQDMProgressBar(refresh_rate=0),
        callbacks.LambdaCallback(on_train_start=lambda trainer, module: None),
        callbacks.LearningRateMonitor("step", log_momentum=True),
        callbacks.DeviceStatsMonitor(),
        callbacks.ThroughputMonitor(lambda batch: len(batch[0]), window_size=2),
    ]


WITH_LOGGER = {"enable_progress_bar": True, "enable_model_summary": True, "log_every_n_steps": 2}
GROUPS = {
    "reporting": reporting,
    "rich": lambda _: [callbacks.RichProgressBar(refresh_rate=0)],
    "accumulation": lambda _: [callbacks.GradientAccumulationScheduler({0: 2, 1: 3})],
    "finetuning": lambda _: [Finetuning()],
    "a backbone": lambda _: [callbacks.BackboneFinetuning(1, verbose=False)],
    "averages": lambda _: [callbacks.StochasticWeightAveraging(0.05, swa_epoch_start=1)],
    "moving averages": lambda _: [callbacks.EMAWeightAveraging(decay=0.9)],
    "equal averages": lambda _: [callbacks.WeightAveraging()],
    "pruning": lambda _: [callbacks.ModelPruning("l1_unstructured", amount=0.2)],
}
MODELS = {"finetuning": with_backbone, "a backbone": with_backbone}
# They search before a fit, as a Tuner does; see test_checkpoints.py. The rest are base classes.
# Lightning itself fails when it loads the state of SpikeDetection.
ELSEWHERE = {"BatchSizeFinder", "LearningRateFinder", "BasePredictionWriter", "SpikeDetection"}
BASES = {"BaseFinetuning", "Callback", "Checkpoint", "ProgressBar"}


def test_every_callback_of_lightning_is_interrupted(tmp_path):
    made = {type(each).__name__ for make in GROUPS.values() for each in make(tmp_path)}
    assert set(callbacks.__all__) - made == ELSEWHERE | BASES


@quietly
@pytest.mark.parametrize("group", GROUPS)
def test_a_callback_of_lightning_is_resumed_exactly_or_refused_in_every_phase(fits, group):
    words = {
        "model": MODELS.get(group, make_model),
        "callbacks": lambda: GROUPS[group](fits.folder),
        "accumulate_grad_batches": 1 if group == "accumulation" else 2,
        "enable_checkpointing": True,
        "max_epochs": 3,
    }
    if group in {"reporting", "rich"}:
        words |= WITH_LOGGER | {"logger": CSVLogger(fits.folder)}
    paths = [fits.folder / f"{number}.ckpt" for number in range(len(PLACES))]
    savers = [
        make_saver(path, **place, stop=False) for path, place in zip(paths, PLACES, strict=True)
    ]
    straight = fits.fit(**words, extra=savers)
    exact = []
    for path in paths:
        try:
            agree(straight, fits.fit(**words, resume=path))
            exact.append(path.stem)
        except InexactResumeError:
            continue
    refused = {"pruning": 4, "moving averages": 1, "equal averages": 1}
    assert len(exact) == 4 - refused.get(group, 0)


class Options(Callback):
    """Sets options of the Trainer in a hook that a resume within an epoch does not call."""

    def on_train_epoch_start(self, trainer, module):
        trainer.gradient_clip_val = 0.01 * (1 + trainer.current_epoch)
        trainer.accumulate_grad_batches = 1 + trainer.current_epoch


class Rates(Callback):
    """Puts another scheduler in the place of the first one, and does not hold it."""

    replaced = False

    def on_train_epoch_start(self, trainer, module):
        if trainer.current_epoch >= 1 and not self.replaced:
            (config,) = trainer.lr_scheduler_configs
            config.scheduler = torch.optim.lr_scheduler.ExponentialLR(trainer.optimizers[0], 0.5)
            self.replaced = True


@quietly
def test_options_that_a_callback_of_the_program_sets_are_restored(fits):
    fits.check(PLACES[0], PLACES[3], callbacks=lambda: [Options()])


@quietly
def test_a_scheduler_that_no_callback_holds_is_named(fits):
    words = {"callbacks": lambda: [Rates()]}
    fits.refuse("schedulers ExponentialLR, and this run has Step", at=PLACES[0], **words)


@quietly
def test_an_epoch_that_trains_nothing_is_not_continued(fits):
    words = {"callbacks": lambda: [callbacks.StochasticWeightAveraging(0.05, swa_epoch_start=1)]}
    fits.refuse("in an epoch that trains nothing", at={"epoch": 3, "batch": 3}, **words)


SECOND = {"epoch": 0, "batch": 2}
EARLY = [SECOND, {"hook": "on_train_epoch_end", "epoch": 0, "batch": 6}]


def scaled(**hooks):
    """Return a model that steps with a loss scale of its own, which grows in the fit."""

    def step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.layers(batch[0]), batch[1])
        self.manual_backward(self.scaler.scale(loss))
        self.scaler.step(optimizer.optimizer)
        self.scaler.update()

    model = make_model(training_step=step, **hooks)
    model.automatic_optimization = False
    model.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=4)
    return model


def save_scale(self, checkpoint):
    checkpoint["scaler"] = self.scaler.state_dict()


def load_scale(self, checkpoint):
    self.scaler.load_state_dict(checkpoint["scaler"])


def test_a_loss_scale_is_exact_if_the_program_saves_it(fits):
    saved = partial(scaled, on_save_checkpoint=save_scale, on_load_checkpoint=load_scale)
    fits.check(*EARLY, model=saved)
    fits.refuse(r"model\.scaler changes in the fit", at=SECOND, model=scaled)


LOSSES = []


def test_a_global_list_is_exact_where_workers_import_the_file(fits):
    def step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self.layers(batch[0]), batch[1])
        loss = loss + 0.01 * sum(LOSSES) * self.layers[0].bias.sum()
        LOSSES.append(loss.item())
        return loss

    fits.new_process, begin = lambda: (LOSSES.clear(), begin()), fits.new_process
    loader = partial(make_loader, num_workers=1)
    fits.check(*EARLY, model=partial(make_model, training_step=step), loader=loader)


class Digits(LightningDataModule):
    """Makes a dataset of what the last one held, and loaders of a size that is searched for."""

    def __init__(self):
        super().__init__()
        self.batch_size, self.data = 16, NoisyDigits()

    def train_dataloader(self):
        return DataLoader(self.data, self.batch_size, shuffle=True)

    def val_dataloader(self):
        return make_loader(shuffle=False)


class Replacing(Digits):
    def train_dataloader(self):
        mean, self.data = self.data.images.mean(), NoisyDigits()
        self.data.images += mean
        return super().train_dataloader()


def test_a_new_dataset_that_continues_another_is_not_resumed_silently(fits):
    words = {"datamodule": Replacing, "reload_dataloaders_every_n_epochs": 1}
    fits.check(SECOND, **words)
    saver = make_saver(fits.checkpoint, **EARLY[1], stop=False)
    fits.fit(**words, extra=[saver], enable_checkpointing=True)
    with pytest.raises(InexactResumeError, match="differs from the run that saved the checkpoint"):
        fits.resume(**words)


@pytest.mark.filterwarnings("ignore")  # Lightning's advice on a search that is this short
def test_a_batch_size_that_was_searched_for_is_that_of_the_checkpoint(fits):
    search = partial(callbacks.BatchSizeFinder, "power", 1, 4, 1)
    words = {"callbacks": lambda: [search()], "datamodule": Digits}
    fits.interrupt(at=SECOND, **words)
    size = fits.trainer.datamodule.batch_size
    assert size != Digits().batch_size
    with pytest.raises(InexactResumeError, match=r"begins at step 0, and .* saved at step 2"):
        fits.resume(**words)
    with pytest.raises(InexactResumeError, match=rf"had \[{size}\] samples .* have \[16\] now"):
        fits.resume(datamodule=Digits)

    def make():
        digits = Digits()
        digits.batch_size = size
        return digits

    assert fits.resume(datamodule=make)
