"""Where Lightning promises something, the callback keeps the promise."""

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from lightning.pytorch.tuner import Tuner
from torch.utils.data import DataLoader, DistributedSampler
from trainings import QUIET

from lightning_d9m import DeterminismCallback
from lightning_d9m.engine.control import session


@pytest.fixture
def make_trainer(tmp_path):
    def make(*, controlled, seed=None, **options):
        callback = DeterminismCallback(seed, ledger_dir=tmp_path)
        callbacks = [callback] if controlled else []
        options = QUIET | {"max_epochs": 2, "default_root_dir": tmp_path} | options
        return pl.Trainer(callbacks=callbacks, **options)

    return make


class RememberingModel(BoringModel):
    """Remembers the first value of each batch; its loader hooks draw their data."""

    def __init__(self):
        super().__init__()
        self.seen = {"train": set(), "validate": set()}

    def forward(self, batch):
        self.seen["train" if self.training else "validate"].add(float(batch[0, 0]))
        return super().forward(batch)


@pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers")
@pytest.mark.parametrize("sanity_steps", [0, 2])
def test_with_overfit_batches_training_and_validation_see_the_same_batch(
    make_trainer, sanity_steps
):
    model = RememberingModel()
    trainer = make_trainer(controlled=True, overfit_batches=1, num_sanity_val_steps=sanity_steps)
    trainer.fit(model)
    assert len(model.seen["train"]) == 1
    assert model.seen["train"] == model.seen["validate"]


def search_rates(trainer):
    torch.manual_seed(0)
    return Tuner(trainer).lr_find(BoringModel(), num_training=12, early_stop_threshold=None).results


def test_a_search_for_a_learning_rate_counts_as_no_fit(make_trainer, monkeypatch):
    monkeypatch.setattr(BoringModel, "lr", 0.1, raising=False)
    results = [search_rates(make_trainer(controlled=True, seed=3)) for _ in range(2)]
    assert results[0] == results[1]
    models = [RememberingModel() for _ in range(3)]
    for model in models[:2]:
        make_trainer(controlled=True, seed=3).fit(model)
    session.restart_fits()
    make_trainer(controlled=True, seed=3).fit(models[2])
    trained = [model.seen["train"] for model in models]
    assert trained[0] == trained[2] != trained[1]


class LoggingSampler(DistributedSampler):
    """Logs its epochs as Lightning sets them and as it is iterated."""

    def __init__(self, dataset, log):
        super().__init__(dataset, num_replicas=1, rank=0)
        self.log = log

    def set_epoch(self, epoch):
        self.log.append(("set", epoch))
        super().set_epoch(epoch)

    def __iter__(self):
        self.log.append(("iterate", self.epoch))
        return super().__iter__()


def log_epochs(trainer):
    """Return the calls of samplers in a fit and in each evaluation after it."""
    log, samplers = [], []

    def make_loader():
        dataset = RandomDataset(32, 8)
        samplers.append(LoggingSampler(dataset, log))
        return DataLoader(dataset, batch_size=4, sampler=samplers[-1])

    model = BoringModel()
    trainer.fit(model, make_loader(), make_loader())
    trainer.validate(model, make_loader(), verbose=False)
    trainer.test(model, make_loader(), verbose=False)
    trainer.predict(model, make_loader())
    return log, [sampler.epoch for sampler in samplers[1:]]


def test_samplers_get_their_epochs_as_often_and_when_lightning_sets_them(make_trainer):
    without = log_epochs(make_trainer(controlled=False))
    assert log_epochs(make_trainer(controlled=True)) == without
    assert ("iterate", 2) in without[0]
