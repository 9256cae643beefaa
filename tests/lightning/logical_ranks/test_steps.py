"""A single logical rank, and batches of several loaders."""

import copy
import gc
import io
import weakref

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback, LearningRateFinder
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.utilities import CombinedLoader
from logical_refusals import DATA, make_model
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Subset
from torch.utils.data.distributed import DistributedSampler
from torchmetrics import (
    CatMetric,
    ClasswiseWrapper,
    MaxMetric,
    MeanMetric,
    PearsonCorrCoef,
    SumMetric,
)
from torchmetrics.classification import MulticlassAccuracy

from lightning_d9m import DeterminismCallback


def load(data):
    """Return a loader whose order does not depend on the number of the fit."""
    return DataLoader(data, 2, sampler=DistributedSampler(data, 1, 0, shuffle=False))


def make_deep_model():
    torch.manual_seed(0)
    return make_model(layer=nn.Sequential(nn.Linear(32, 300), nn.Tanh(), nn.Linear(300, 2)))


def train(fit, **words):
    model = make_deep_model()
    trainer = fit(model, load(DATA), **words)
    return trainer.global_step, [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("ranks", [1, None])
def test_with_one_logical_rank_or_no_number_the_bits_are_those_of_lightning(fit, ranks):
    # Without logical ranks, batches may be accumulated: two more than a multiple in each epoch.
    words = {"accumulate_grad_batches": 1 if ranks else 3, "max_epochs": 2}
    steps, weights = train(fit, ranks=ranks, **words)
    expected_steps, expected = train(fit, strategy="auto" if ranks else "ddp", **words)
    assert steps == expected_steps == (16 if ranks else 6)
    assert all(map(torch.equal, weights, expected))


def record_batches(fit, loaders):
    """Return the number of steps, and the batch of each micro-batch."""
    seen = []

    def step(model, batch):
        seen.append(batch)
        return sum(model(part).sum() for part in tree_leaves(batch) if part is not None)

    return fit(make_model(step), loaders).global_step, seen


@pytest.mark.parametrize(
    ("mode", "batches"), [("min_size", 1), ("max_size", 2), ("max_size_cycle", 2)]
)
def test_a_batch_of_several_loaders_has_a_part_of_each_for_every_logical_rank(fit, mode, batches):
    long, short = load(DATA), load(Subset(DATA, range(4)))
    steps, found = record_batches(fit, CombinedLoader({"one": long, "others": [short]}, mode))
    assert steps == batches
    assert len(found) == 4 * batches
    for loader, parts in (
        (long, [batch["one"] for batch in found]),
        (short, [batch["others"][0] for batch in found]),
    ):
        _, expected = record_batches(fit, loader)
        if mode != "min_size" and loader is short:
            expected += expected if mode == "max_size_cycle" else [None] * 4
        for part, one in zip(parts, expected, strict=mode != "min_size"):
            assert part is one is None or torch.equal(part, one)


def make_counting_model():
    """Return a model with metrics whose states are numbers, lists, and rows for each rank."""

    def count(model, batch):
        model.seen.update(len(batch))
        model.rows.update(batch[:, 0])
        model.largest.update(batch[:, 0])
        model.mean.update(batch[:, 0])
        model.both.update(batch[:, 0], batch[:, 1])
        return model(batch).sum()

    kinds = {"seen": SumMetric, "rows": CatMetric, "largest": MaxMetric, "mean": MeanMetric}
    return make_model(count, both=PearsonCorrCoef(), **{name: own() for name, own in kinds.items()})


def compute_all(model):
    found = {name: float(getattr(model, name).compute()) for name in ("seen", "largest", "mean")}
    found |= {"rows": sorted(model.rows.compute().tolist()), "both": float(model.both.compute())}
    return found


def test_a_metric_has_the_state_of_all_logical_ranks_after_the_run(fit):
    """A copy has it, and another fit continues from it, as in one run over all samples."""
    model = make_counting_model()
    rows = torch.stack(list(DATA))[:, :2]
    for times in (1, 2):
        fit(model, load(DATA))
        seen = rows.repeat(times, 1)
        expected = {
            "seen": len(seen),
            "largest": float(seen[:, 0].max()),
            "mean": pytest.approx(float(seen[:, 0].mean()), rel=1e-5),
            "rows": sorted(seen[:, 0].tolist()),
            "both": pytest.approx(float(torch.corrcoef(seen.T)[0, 1]), rel=1e-4),
        }
        for each in (model, copy.deepcopy(model), model._apply(lambda value: value.clone())):
            assert compute_all(each) == expected
    model.seen.update(5)
    fit(model, load(DATA))
    assert model.seen.compute() == 3 * 16 + 5
    model.seen.reset()
    model.seen.update(5)
    assert model.seen.compute() == 5
    fit(model, load(DATA))
    assert model.seen.compute() == 5 + 16


def test_a_metric_does_not_keep_the_trainer(fit):
    model = make_counting_model()
    trainer = weakref.ref(fit(model, load(DATA)))
    model.trainer = None
    gc.collect()
    assert trainer() is None
    assert all(
        type(own).__module__ != "lightning_d9m.attribute_patches"
        for own in vars(model.seen).values()
    )


class Wrapping(BoringModel):
    """Updates a metric that wraps another one in a hook."""

    def __init__(self):
        super().__init__()
        self.by_class = ClasswiseWrapper(MulticlassAccuracy(2, average=None))
        self.plain, self.found = SumMetric(), []

    def on_train_epoch_end(self):
        self.plain.update(1)
        known = self.plain.compute()
        self.by_class.update(torch.tensor([0, 1, 1, 1]), torch.tensor([0, 1, 0, 1]))
        assert self.plain.compute() is known  # what it has computed stays valid
        self.found.append([float(own) for own in self.by_class.compute().values()])
        self.by_class.reset()


def test_a_metric_that_wraps_another_is_updated_in_a_hook(fit):
    model = Wrapping()
    fit(model, load(DATA), max_epochs=2)
    assert model.found == [[0.5, 1.0]] * 2


class Growing(BoringModel):
    """Adds a layer in its second epoch, whose gradient must be the mean of all samples."""

    def on_train_epoch_start(self):
        if self.current_epoch == 1:
            self.head = nn.Linear(32, 1, bias=False)
            self.trainer.optimizers[0].add_param_group({"params": self.head.parameters()})

    def training_step(self, batch, batch_idx):
        loss = self.layer(batch).sum()
        return loss + self.head(batch).mean() if self.current_epoch else loss

    def on_after_backward(self):
        if self.current_epoch:
            self.gradient = self.head.weight.grad.clone()


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_a_parameter_that_is_added_during_a_fit_is_trained_on_all_logical_ranks(fit, ranks):
    model = Growing()
    loader = DataLoader(DATA, len(DATA) // ranks, sampler=DistributedSampler(DATA, 1, 0))
    fit(model, loader, ranks=ranks, max_epochs=2)
    mean = torch.stack(list(DATA)).mean(0, keepdim=True)
    torch.testing.assert_close(model.gradient, mean)


def test_a_fit_begins_at_the_step_of_a_search_for_a_learning_rate(fit):
    """It is another step than that of the search, and no second run of it."""
    search = LearningRateFinder(num_training_steps=1)
    trainer = fit(make_model(lr=0.1), load(DATA), callbacks=[DeterminismCallback(), search])
    assert trainer.global_step == 2


class Evaluated(BoringModel):
    def validation_step(self, batch, batch_idx):
        return batch

    def on_validation_batch_end(self, outputs, batch, batch_idx, dataloader_idx=0):
        self.found = outputs, batch


def test_a_hook_of_an_evaluation_gets_the_batches_of_several_loaders(fit):
    model = Evaluated()
    trainer = fit(model, load(DATA))
    trainer.validate(model, CombinedLoader({"one": load(DATA)}, "max_size"), verbose=False)
    outputs, batches = model.found
    assert len(batches) == len(outputs) == 4
    for output, batch in zip(outputs, batches, strict=True):
        assert torch.equal(output["one"], batch["one"])


class Hooked(BoringModel):
    def __init__(self):
        super().__init__()
        self.seen, self.batches = SumMetric(), []

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.batches.append(batch_idx)


def test_a_copy_or_file_of_the_model_during_a_run_has_its_own_methods(fit):
    """As callbacks make them that average weights."""
    found, file = [], io.BytesIO()

    def keep(trainer, model):
        found.append(copy.deepcopy(model))
        torch.save(model, file)

    model = Hooked()
    callbacks = [DeterminismCallback(), LambdaCallback(on_train_start=keep)]
    fit(model, load(DATA), callbacks=callbacks)
    found.append(torch.load(io.BytesIO(file.getvalue()), weights_only=False))
    for each in found:
        each.on_train_batch_end(None, None, 7)
        each.seen.update(3)
        assert each.on_before_batch_transfer("batch", 0) == "batch"
        assert (each.batches, each.seen.compute()) == ([7], 3)
    assert model.batches == [0, 1]


def test_the_class_of_a_model_needs_no_registered_module(fit, monkeypatch):
    monkeypatch.setattr(Hooked, "__module__", "a_file_that_the_program_loads")
    assert fit(Hooked()).global_step == 2
