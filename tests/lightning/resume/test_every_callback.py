"""A run with any of Lightning's callbacks, interrupted in any phase, is exact, or it is refused."""

import pytest
import torch
from lightning.pytorch import callbacks
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger
from resuming import agree, make_saver
from trainings import make_model

from lightning_d9m import InexactResumeError

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

# Within accumulation, within a validation, after it, and between epochs.
PLACES = [
    {"batch": 3},
    {"hook": "on_validation_batch_end", "batch": 6},
    {"hook": "on_validation_end", "batch": 6},
    {"hook": "on_train_epoch_end", "batch": 6},
]


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


@pytest.mark.parametrize("group", GROUPS)
def test_it_is_resumed_exactly_or_refused_in_every_phase(fits, group):
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
    """Puts another scheduler in the place of the first one."""

    def __init__(self, *, keeps):
        self.keeps = keeps

    def on_train_epoch_start(self, trainer, module):
        if trainer.current_epoch >= 1 and not hasattr(self, "own"):
            (config,) = trainer.lr_scheduler_configs
            config.scheduler = torch.optim.lr_scheduler.ExponentialLR(trainer.optimizers[0], 0.5)
            self.own = config.scheduler if self.keeps else True


def test_options_that_a_callback_of_the_program_sets_are_restored(fits):
    fits.check(PLACES[0], PLACES[3], callbacks=lambda: [Options()])


def test_a_scheduler_that_no_callback_holds_is_named(fits):
    words = {"callbacks": lambda: [Rates(keeps=False)]}
    fits.refuse("schedulers ExponentialLR, and this run has Step", at=PLACES[0], **words)


def test_an_epoch_that_trains_nothing_is_not_continued(fits):
    words = {"callbacks": lambda: [callbacks.StochasticWeightAveraging(0.05, swa_epoch_start=1)]}
    fits.refuse("in an epoch that trains nothing", at={"epoch": 3, "batch": 3}, **words)
