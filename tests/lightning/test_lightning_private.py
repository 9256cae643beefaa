"""The private attributes of Lightning that this package uses, checked on the installed version."""

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from trainings import QUIET

from lightning_d9m.lightning import lightning_private


@pytest.fixture
def trainer(tmp_path):
    """A Trainer that trains one epoch of two batches."""
    return pl.Trainer(default_root_dir=tmp_path, max_epochs=1, limit_train_batches=2, **QUIET)


def test_the_loaders_of_a_loop_are_listed_flat(trainer):
    assert lightning_private.list_loaders(trainer.fit_loop) == []
    first, second = (BoringModel().train_dataloader() for _ in range(2))

    class NestedModel(BoringModel):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch["b"][0], batch_idx)

        def train_dataloader(self):
            return {"a": first, "b": [second]}

    trainer.fit(NestedModel())
    assert lightning_private.list_loaders(trainer.fit_loop) == [first, second]


def test_the_data_sources_of_a_fit_give_its_loaders(trainer):
    model = BoringModel()
    trainer.fit(model)
    sources = lightning_private.fit_data_sources(trainer)
    for stage, hook in (("train", "train_dataloader"), ("validate", "val_dataloader")):
        setattr(model, hook, lambda stage=stage: [stage])
        assert sources[stage].dataloader() == [stage]


def test_the_fit_that_is_set_up_resumes_from_the_checkpoint(trainer, tmp_path):
    path = tmp_path / "saved.ckpt"
    model = BoringModel()
    trainer.fit(model)
    trainer.save_checkpoint(path)

    class ResumeInSetup(pl.Callback):
        def setup(self, trainer, pl_module, stage):
            lightning_private.resume_next_fit(trainer, path)

    resumed = pl.Trainer(
        default_root_dir=tmp_path, max_epochs=1, callbacks=[ResumeInSetup()], **QUIET
    )
    other = BoringModel()
    resumed.fit(other)
    assert (resumed.global_step, resumed.current_epoch) == (2, 1)
    for expected, actual in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(expected, actual)
    assert "resume_start" not in vars(resumed._checkpoint_connector)
