"""A run that is interrupted anywhere and resumed ends at the bits of the uninterrupted one."""

from functools import partial

import pytest
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import CombinedLoader
from resuming import Curriculum, OwnOrder, evidence
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler
from trainings import NoisyDigits, make_loader, make_model


def drawn_batches(sampler, **words):
    return DataLoader(NoisyDigits(), batch_sampler=sampler(), **words)


def shards():
    """Return the loader of the second of two ranks."""
    data = NoisyDigits(192)
    return DataLoader(data, batch_size=16, sampler=DistributedSampler(data, 2, 1))


def two_loaders(mode="max_size_cycle", **words):
    longer, shorter = make_loader(**words), make_loader(size=64, **words)
    return CombinedLoader([longer, shorter], mode)


def step_on_two(self, batch, batch_idx):
    (images, classes), other = batch
    if other is not None:  # the shorter one's end, where it is not begun anew
        images = images + 0.1 * other[0]
    loss = nn.functional.cross_entropy(self.layers(images), classes)
    self.log("train_loss", loss, on_step=True, on_epoch=True, batch_size=16)
    return loss


def plateau(self):
    optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
    return {
        "optimizer": optimizer,
        "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"},
    }


class Reloaded(LightningDataModule):
    """Gives new loaders whenever it is asked, of as many batches as the epoch says."""

    workers = 0

    def train_dataloader(self):
        size = (96, 64, 80)[self.trainer.current_epoch]
        return make_loader(size=size, num_workers=self.workers)

    def val_dataloader(self):
        return make_loader(shuffle=False)


class ReloadedWithWorkers(Reloaded):
    workers = 2


class ReloadedAround(Reloaded):
    """Gives new loaders, of which one has the same sampler in each epoch."""

    def __init__(self, workers=0):
        super().__init__()
        self.workers, self.sampler = workers, Curriculum()

    def train_dataloader(self):
        own = drawn_batches(lambda: self.sampler, num_workers=self.workers)
        return CombinedLoader([super().train_dataloader(), own], "min_size")


def accumulating():
    """Return a model that steps after every fourth batch, also across epochs."""

    def step(self, batch, batch_idx):
        self.manual_backward(nn.functional.cross_entropy(self.layers(batch[0]), batch[1]))
        self.trained += 1
        if self.trained % 4 == 0:
            self.optimizers().step()
            self.optimizers().zero_grad()

    model = make_model(training_step=step)
    model.automatic_optimization = False
    model.register_buffer("trained", torch.zeros((), dtype=torch.int64))
    return model


def unfreezing():
    """Return a model that trains its first layers from epoch 1 on."""

    def unfreeze(self):
        if self.current_epoch == 1:
            self.layers[0].requires_grad_(True)
            self.layers[1].track_running_stats = True

    model = make_model(on_train_epoch_start=unfreeze)
    model.layers[0].requires_grad_(False)
    model.layers[1].track_running_stats = False
    return model


def schedule_by_estimated_steps(self):
    """Read the number of steps, for which Lightning loads the data before it restores its loops."""
    optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
    steps = self.trainer.estimated_stepping_batches
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=steps)
    return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class ByEpoch:
    """A scheduler of the program, which has no state."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def step(self, epoch):
        for group in self.optimizer.param_groups:
            group["lr"] = 0.01 / (epoch + 1)

    def state_dict(self):
        pass

    def load_state_dict(self, state):
        assert state is None


def schedule_by_epoch(self):
    optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
    return [optimizer], [ByEpoch(optimizer)]


def step_by_epoch(self, scheduler, _):
    scheduler.step(self.current_epoch)


TRAINED = [{"batch": 2}, {"batch": 1, "epoch": 0}, {"batch": 6}]
HOOKS = [{"hook": hook} for hook in ("on_validation_end", "on_validation_batch_end")]
AT_END = {"hook": "on_train_epoch_end", "epoch": 0, "batch": 6}
ANYWHERE = [{"batch": 3}, {"batch": 5}, {"hook": "on_train_epoch_end"}]
COUNTED = {"progress": True, "max_epochs": 2}
PERSISTENT = {"num_workers": 2, "persistent_workers": True}
RELOADED = {"reload_dataloaders_every_n_epochs": 1}
ON_TWO = {"model": partial(make_model, training_step=step_on_two)}
ESTIMATED = {"model": partial(make_model, configure_optimizers=schedule_by_estimated_steps)}
BATCHES = {"loader": partial(drawn_batches, Curriculum)}
BATCHES["validate"] = BATCHES["loader"]
# What is trained, and where it is interrupted.
RUNS = {
    "a validation": (COUNTED, [*TRAINED, AT_END, *({"batch": 6} | hook for hook in HOOKS)]),
    "an early validation": (COUNTED | {"val_check_interval": 2}, [*TRAINED, *HOOKS]),
    "no validation": (COUNTED | {"limit_val_batches": 0}, [*TRAINED, AT_END]),
    "a seed for each sample, in workers": (
        {"loader": partial(make_loader, **PERSISTENT), "words": {"per_sample_rng": True}},
        ANYWHERE,
    ),
    "layers that an epoch unfreezes": ({"model": unfreezing}, ANYWHERE),
    "accumulation by the module": ({"model": accumulating, "limit_val_batches": 0}, ANYWHERE),
    "accumulation": ({"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}, ANYWHERE),
    "a scheduler that waits for metrics": (
        {"model": partial(make_model, configure_optimizers=plateau)},
        ANYWHERE,
    ),
    "a scheduler without state": (
        {
            "model": partial(
                make_model,
                configure_optimizers=schedule_by_epoch,
                lr_scheduler_step=step_by_epoch,
            )
        },
        ANYWHERE,
    ),
    "a schedule by estimated steps": (ESTIMATED, [{"batch": 2}, AT_END]),
    "a schedule by estimated steps, in workers": (
        ESTIMATED | {"loader": partial(make_loader, **PERSISTENT)},
        [{"batch": 2}, AT_END],
    ),
    "batches of a sampler that changes": (BATCHES, ANYWHERE),
    "batches of a generator of the user's from workers": (
        {"loader": partial(drawn_batches, OwnOrder, **PERSISTENT)},
        [{"batch": 3}],
    ),
    "a distributed sampler": ({"loader": shards}, [{"batch": 3}]),
    "two loaders": (ON_TWO | {"loader": two_loaders}, ANYWHERE),
    "two loaders to the end of the shorter": (
        ON_TWO | {"loader": partial(two_loaders, "min_size", num_workers=1)},
        [{"batch": 3}],
    ),
    "two loaders, after the end of the shorter": (
        ON_TWO | {"loader": partial(two_loaders, "max_size")},
        [{"batch": 5}],
    ),
    "a datamodule that reloads": (
        {"datamodule": Reloaded, "reload_dataloaders_every_n_epochs": 2},
        ANYWHERE,
    ),
    "a datamodule that reloads each epoch": (
        RELOADED | {"datamodule": ReloadedWithWorkers},
        [{"batch": 4}],
    ),
    "a datamodule that reloads each epoch, after a sanity check": (
        ON_TWO | RELOADED | {"datamodule": ReloadedAround, "num_sanity_val_steps": 1},
        [{"batch": 4}],
    ),
}


@pytest.mark.parametrize(("words", "places"), RUNS.values(), ids=RUNS)
@pytest.mark.filterwarnings("ignore:Found 1 module:UserWarning")
def test_a_run_of_each_kind_is_resumed_anywhere(fits, words, places):
    fits.check(*places, **words)


def test_layers_that_a_resume_unfreezes_are_said(fits, caplog):
    """A program that was changed to train other layers learns why it does not."""
    fits.interrupt(model=unfreezing, at={"batch": 3})
    with caplog.at_level("INFO"):
        fits.resume(model=unfreezing)
    assert "2 parameters frozen or unfrozen as when the checkpoint was saved, layers.0.weight" in (
        caplog.text
    )


def test_loaders_that_are_loaded_anew_draw_the_same_with_workers_and_without(fits):
    """Lightning iterates them twice, and workers take batches of the first time too."""
    words = RELOADED | {"max_epochs": 2} | ON_TWO
    straight = fits.fit(datamodule=ReloadedAround, **words)
    with_workers = fits.fit(datamodule=partial(ReloadedAround, 2), **words)
    assert evidence(with_workers) == evidence(straight)
