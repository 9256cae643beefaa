"""State that a program or any callback keeps in any way is exact after a resume, or is refused."""

import copy
import queue
import sys
import threading
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch
from lightning.pytorch import LightningDataModule, callbacks
from lightning.pytorch.callbacks import Callback, LambdaCallback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from resuming import agree, make_saver
from torch import nn
from torch.utils.data import DataLoader
from trainings import NoisyDigits, make_loader, make_model

from lightning_d9m import InexactResumeError

# A package of another environment that is on the path, of which nothing is the program's.
PACKAGE = sys.modules["other_package"] = ModuleType("other_package")
PACKAGE.__file__ = "/other/lib/python3/dist-packages/other_package.py"
PACKAGE.count = 0


HOOKS = ("on_validation_batch_end", "on_validation_end", "on_train_epoch_end")
# Within accumulation, within a validation, after it, and between epochs.
PLACES = [{"batch": 3}, *({"hook": hook, "batch": 6} for hook in HOOKS)]


class Keeping(Callback):
    """Keeps an object whose state no attribute shows, and changes it in each batch."""

    def __init__(self, kept, change):
        self.kept, self.change = kept, change

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.change(self.kept)


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


class Large(Callback):
    """Keeps more than a checkpoint takes, and saves it itself if it should."""

    def __init__(self, saves):
        self.table, self.saves = torch.zeros(2**23), saves

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.table.data[batch_idx] += 1
        self.table.add_(0)
        with torch.no_grad():
            module.layers[-1].bias.add_(1e-3 * self.table[:8].sum())

    def state_dict(self):
        return {"table": self.table.clone()} if self.saves else {}

    def load_state_dict(self, state_dict):
        self.table = state_dict.get("table", self.table)


def test_large_values_are_left_to_the_callback_or_refused(fits):
    fits.check({"batch": 2}, callbacks=lambda: [Large(saves=True)])
    assert (fits.folder / "0.ckpt").stat().st_size < 2**26
    words = {"callbacks": lambda: [Large(saves=False)]}
    fits.refuse(
        r"Large\.table changes in the fit.* or more than 16777216", at={"batch": 2}, **words
    )


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
    # At its start the callback does not put its scheduler in the place of the first one again.
    fits.check({"hook": "on_train_epoch_end", "epoch": 2, "batch": 6}, **words)


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


class Anchored(Callback):
    """Draws the weights to those that training began with, and keeps a copy of all layers."""

    def on_fit_start(self, trainer, module):
        self.norm = float(sum(own.detach().square().sum() for own in module.parameters()))
        self.copy = copy.deepcopy(module.layers)

    def on_train_start(self, trainer, module):
        self.first = {name: own.detach().clone() for name, own in module.named_parameters()}

    @torch.no_grad()
    def on_after_backward(self, trainer, module):
        for name, own in module.named_parameters():
            own.grad += (own - self.first[name]) / self.norm
        module.layers[1].bias.grad += self.copy[1].running_var - self.copy[1].weight


def test_what_is_made_of_the_weights_when_a_fit_starts_is_that_of_the_first_fit(fits):
    fits.check(*EARLY, callbacks=lambda: [Anchored()])


def test_a_large_copy_of_the_weights_that_the_fit_starts_with_is_refused(fits, monkeypatch):
    monkeypatch.setattr("lightning_d9m.engine.state.changes._MOST_BYTES", 100)
    monkeypatch.setattr("lightning_d9m.engine.state.changes._ALWAYS_BYTES", 100)
    error = fits.refuse("changes in the fit, or may change", callbacks=lambda: [Anchored()])
    assert "callbacks.Anchored.copy.0.weight changes" in str(error)


class Looking(Callback):
    """Keeps the dataset that it reads."""

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.data = trainer.train_dataloader.dataset
        module.layers[4].bias.data += 1e-3 * self.data.images.mean()


def test_a_callback_may_keep_the_dataset_of_a_loader(fits):
    fits.check(*EARLY, callbacks=lambda: [Looking()])
