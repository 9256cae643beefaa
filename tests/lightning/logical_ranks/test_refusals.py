"""What logical ranks do not support is refused before training, on one process too."""

import os

import lightning as L
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, WeightedRandomSampler
from torch.utils.data.distributed import DistributedSampler
from torchmetrics import MeanMetric
from trainings import QUIET

from lightning_d9m import (
    DDPDeterministicStrategy,
    DeterminismCallback,
    InexactResumeError,
    SettingError,
)


@pytest.fixture
def fit(tmp_path):
    """Return a function that trains on one process of four logical ranks."""

    def run(model=None, loader=None, callbacks=None, options=None, resumed=None, ranks=4, **words):
        strategy = DDPDeterministicStrategy(logical_ranks=ranks, **options or {})
        callbacks = [DeterminismCallback()] if callbacks is None else callbacks
        trainer = L.Trainer(
            default_root_dir=tmp_path,
            max_epochs=1,
            devices=1,
            strategy=strategy,
            callbacks=callbacks,
            **QUIET | words,
        )
        loader = DataLoader(RandomDataset(32, 16), batch_size=2) if loader is None else loader
        trainer.fit(model or BoringModel(), loader, ckpt_path=resumed)
        return trainer

    before = dict(os.environ)
    yield run
    for name in os.environ.keys() - before:  # Lightning's launcher sets the address of the group
        del os.environ[name]
    torch.distributed.destroy_process_group()


def make_model(step=None, optimizer=None, **attributes):
    """Return a model with other steps or attributes."""
    model = BoringModel()
    for name, value in attributes.items():
        setattr(model, name, value)
    if step is not None:
        model.training_step = lambda batch, batch_idx: step(model, batch)
    if optimizer is not None:
        model.configure_optimizers = lambda: optimizer(model.parameters())
    return model


def test_a_plain_training_is_accepted(fit):
    assert fit().global_step == 2


def test_accumulation_is_refused(fit):
    with pytest.raises(SettingError, match="set logical_ranks to 12 for the same number"):
        fit(accumulate_grad_batches=3)


def test_a_schedule_of_accumulation_is_refused(fit):
    callbacks = [DeterminismCallback(), L.pytorch.callbacks.GradientAccumulationScheduler({0: 2})]
    with pytest.raises(SettingError, match="accumulate_grad_batches is 2"):
        fit(callbacks=callbacks)


def test_manual_optimization_is_refused(fit):
    with pytest.raises(SettingError, match="BoringModel has automatic_optimization=False"):
        fit(make_model(automatic_optimization=False))


def test_synchronized_batch_normalization_is_refused(fit):
    with pytest.raises(SettingError, match="'norm' is a SyncBatchNorm"):
        fit(make_model(norm=nn.SyncBatchNorm(2)))
    with pytest.raises(SettingError, match="sync_batchnorm is True"):
        fit(sync_batchnorm=True)


def test_an_optimizer_that_runs_its_closure_again_is_refused(fit):
    with pytest.raises(SettingError, match="LBFGS runs the training step several times"):
        fit(make_model(optimizer=torch.optim.LBFGS))

    class Twice(torch.optim.SGD):
        def step(self, closure=None):
            closure()
            return super().step(closure)

    with pytest.raises(SettingError, match="ran the training step twice for one batch"):
        fit(make_model(optimizer=lambda parameters: Twice(parameters, lr=0.1)))


def test_a_step_without_a_loss_is_refused(fit):
    with pytest.raises(SettingError, match="returned NoneType without a loss"):
        fit(make_model(lambda model, batch: None))


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("all_gather", lambda model: model.all_gather(torch.ones(1))),
        ("reduce", lambda model: model.trainer.strategy.reduce(torch.ones(1))),
        ("broadcast", lambda model: model.trainer.strategy.broadcast(1)),
        ("barrier", lambda model: model.trainer.strategy.barrier()),
        (
            "torch.distributed.all_reduce",
            lambda model: torch.distributed.all_reduce(torch.ones(1)),
        ),
    ],
)
def test_a_collective_in_a_step_is_refused(fit, name, call):
    def step(model, batch):
        call(model)
        return model(batch).sum()

    with pytest.raises(SettingError, match=f"^{name} is called in the step of logical rank 0"):
        fit(make_model(step))
    torch.distributed.all_reduce(torch.ones(1))  # it can be called again


def test_the_callback_is_needed(fit):
    with pytest.raises(SettingError, match=r"add callbacks=\[DeterminismCallback\(\)\]"):
        fit(callbacks=[])


def test_options_of_ddp_are_refused(fit):
    with pytest.raises(SettingError, match="gradient_as_bucket_view=True is an option of DDP"):
        fit(options={"gradient_as_bucket_view": True})
    assert fit(options={"find_unused_parameters": True}).global_step == 2


@pytest.mark.parametrize("ranks", [0, -1, 1.5, True])
def test_a_number_of_logical_ranks_is_a_whole_number(fit, ranks):
    with pytest.raises(SettingError, match=f"logical_ranks={ranks!r} is not allowed"):
        DDPDeterministicStrategy(logical_ranks=ranks)
    fit()  # for the fixture


class Numbers(IterableDataset):
    """Numbers without indices."""

    def __iter__(self):
        return iter(torch.ones(8, 32))


class Batches:
    """Batches that no DataLoader makes."""

    def __iter__(self):
        return iter(torch.ones(4, 2, 32))


class Keeper(Dataset):
    """Draws from a generator that it keeps."""

    def __init__(self):
        self.noise = torch.Generator()

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.rand(32, generator=self.noise)


DATA = RandomDataset(32, 16)


class OwnSampler(DistributedSampler):
    """A user's sampler."""


LOADERS = {
    "A Batches loads the data": Batches(),
    "Numbers is an IterableDataset, whose samples have no indices": DataLoader(
        Numbers(), batch_size=2
    ),
    "has batch_size=None": DataLoader(DATA, batch_size=None),
    r"draws from its own generators \(dataset.noise\)": DataLoader(Keeper(), batch_size=2),
    "The sampler OwnSampler splits the samples among 2 processes": DataLoader(
        DATA, sampler=OwnSampler(DATA, 2, 0)
    ),
}


@pytest.mark.parametrize("message", LOADERS)
def test_data_that_cannot_be_split_are_refused(fit, message):
    with pytest.raises(SettingError, match=message):
        fit(loader=LOADERS[message])


def test_several_loaders_are_refused(fit):
    loaders = {"a": DataLoader(DATA), "b": DataLoader(DATA)}
    with pytest.raises(SettingError, match="A batch comes from several loaders at once"):
        fit(loader=loaders)


def test_a_loader_that_lightning_does_not_split_is_refused(fit):
    with pytest.raises(SettingError, match="has the sampler SequentialSampler, which all"):
        fit(use_distributed_sampler=False)


def test_samplers_of_torch_are_split(fit):
    for sampler in (WeightedRandomSampler(torch.ones(16), 16), DistributedSampler(DATA, 2, 0)):
        assert fit(loader=DataLoader(DATA, batch_size=2, sampler=sampler)).global_step == 2


def test_an_evaluation_that_changes_a_buffer_is_refused(fit):
    model = BoringModel()
    model.register_buffer("count", torch.zeros(()))
    model.validation_step = lambda batch, batch_idx: model.count.add_(1)
    with pytest.raises(SettingError, match="changes the buffer 'count'"):
        fit(model)


def test_sparse_gradients_are_summed_as_dense_ones_on_request(fit):
    model = make_model(
        lambda model, batch: model.table(torch.tensor([1, 1, 2])).sum(),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        table=nn.Embedding(4, 2, sparse=True),
    )
    with pytest.raises(SettingError, match="and sums over logical ranks are dense"):
        fit(model)
    before = model.table.weight.detach().clone()
    fit(model, options={"sparse_as_dense": True})
    # Each of two steps adds the gradient of all logical ranks, divided by their number.
    expected = before - 0.2 * torch.tensor([0.0, 2.0, 1.0, 0.0])[:, None]
    assert torch.allclose(model.table.weight, expected)


def test_a_metric_is_not_computed_within_a_step(fit):
    def step(model, batch):
        model.mean.update(model(batch).sum())
        return model.mean.compute()

    with pytest.raises(SettingError, match="MeanMetric is computed over all processes in the step"):
        fit(make_model(step, mean=MeanMetric()))


def test_a_checkpoint_needs_the_same_logical_ranks_and_threads(fit, tmp_path):
    path = tmp_path / "saved.ckpt"
    fit().save_checkpoint(path)
    with pytest.raises(InexactResumeError, match="saved with logical_ranks=4; now it is 2"):
        fit(ranks=2, resumed=path, max_steps=8)
    threads = torch.get_num_threads() + 1
    with pytest.raises(InexactResumeError, match=f"CPU threads; now they have {threads}"):
        fit(callbacks=[DeterminismCallback(threads=threads)], resumed=path)


def test_the_variable_sets_the_number_of_logical_ranks(monkeypatch):
    monkeypatch.setenv("LIGHTNING_D9M_LOGICAL_RANKS", "6")
    strategy = L.Trainer(strategy="ddp_d9m", devices=1, **QUIET).strategy
    assert isinstance(strategy, DDPDeterministicStrategy)
    assert strategy.logical_ranks == 6
    monkeypatch.setenv("LIGHTNING_D9M_LOGICAL_RANKS", "six")
    with pytest.raises(SettingError, match="LIGHTNING_D9M_LOGICAL_RANKS is 'six'"):
        DDPDeterministicStrategy()
    monkeypatch.delenv("LIGHTNING_D9M_LOGICAL_RANKS")
    assert DDPDeterministicStrategy().logical_ranks is None


def test_more_processes_than_logical_ranks_are_refused(monkeypatch):
    strategy = DDPDeterministicStrategy(logical_ranks=2)
    monkeypatch.setattr(type(strategy), "world_size", 3)
    with pytest.raises(SettingError, match="There are 3 processes, but only 2 logical ranks"):
        strategy.blocks  # noqa: B018 - it raises
