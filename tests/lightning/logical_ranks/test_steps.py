"""Batches that are accumulated, and batches of several loaders, in a process of logical ranks."""

import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities import CombinedLoader
from logical_refusals import DATA, make_model
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Subset
from torch.utils.data.distributed import DistributedSampler

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
    words = {"accumulate_grad_batches": 3, "max_epochs": 2}  # and two more batches in each epoch
    steps, weights = train(fit, ranks=ranks, **words)
    expected_steps, expected = train(fit, strategy="auto" if ranks else "ddp", **words)
    assert steps == expected_steps == 6
    assert all(map(torch.equal, weights, expected))
    _, others = train(fit, ranks=ranks, max_epochs=2)
    assert not torch.equal(weights[0], others[0])


def test_a_batch_of_accumulation_is_one_step_of_more_samples(fit):
    """The gradients are the mean of those of all micro-batches."""
    _, weights = train(fit, accumulate_grad_batches=2)
    _, expected = train(fit, ranks=8)
    for found, one in zip(weights, expected, strict=True):
        assert torch.allclose(found, one, rtol=1e-5, atol=1e-7)


def test_a_schedule_of_accumulation_changes_the_number_of_steps(fit):
    schedule = GradientAccumulationScheduler({0: 2, 1: 1})
    callbacks = [DeterminismCallback(), schedule]
    assert fit(callbacks=callbacks, max_epochs=2).global_step == 1 + 2


def test_gradients_that_share_memory_are_accumulated_once(fit):
    """Autograd lets both parameters have the memory of one gradient."""
    first, second = nn.Parameter(torch.zeros(2, 6)), nn.Parameter(torch.zeros(3, 4))
    model = make_model(lambda model, batch: (first.view(-1) + second.view(-1)).sum())
    model.register_parameter("first", first)
    model.register_parameter("second", second)
    fit(model, accumulate_grad_batches=2)
    assert first.unique().tolist() == second.unique().tolist() == [pytest.approx(-0.1)]


def test_hooks_get_the_divided_loss_of_the_first_logical_rank(fit):
    losses, given = [], []

    def step(model, batch):
        losses.append(model(batch).square().mean())
        return losses[-1]

    def on_train_batch_end(model, outputs, *_):
        given.append(outputs["loss"].item())

    fit(make_model(step, on_train_batch_end=on_train_batch_end), accumulate_grad_batches=2)
    assert given == [loss.item() / 2 for loss in losses[::4]]
    assert len(losses) == 8


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
