"""The attributes that Lightning's annotations lack are there, and are those of the Trainer."""

import lightning.pytorch as L
from trainings import QUIET, make_loader, make_model

from lightning_d9m.lightning.trainer_attributes import (
    get_datamodule,
    get_epoch_counts,
    get_reload_interval,
    list_callbacks,
)


class Data(L.LightningDataModule):
    def train_dataloader(self):
        return make_loader()

    def val_dataloader(self):
        return make_loader(shuffle=False)


class Noting(L.Callback):
    """Notes that a hook ran."""

    ran = False

    def on_train_start(self, trainer, pl_module):
        self.ran = True


def test_each_attribute(tmp_path):
    first, appended, data = L.Callback(), Noting(), Data()
    trainer = L.Trainer(
        **QUIET,
        max_epochs=2,
        callbacks=[first],
        reload_dataloaders_every_n_epochs=3,
        default_root_dir=tmp_path,
    )
    list_callbacks(trainer).append(appended)
    trainer.fit(make_model(), datamodule=data)
    assert list_callbacks(trainer)[0] is first
    assert appended.ran
    assert get_datamodule(trainer) is data
    assert get_reload_interval(trainer) == 3
    counts = get_epoch_counts(trainer)
    assert (counts.ready, counts.started, counts.processed, counts.completed) == (2, 2, 2, 2)
