"""Errors of ranks, raised in this process."""

import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from lightning_d9m.errors import RanksDisagreeError, SettingError
from lightning_d9m.horovod.communication.communicator import Communicator
from lightning_d9m.horovod.communication.intents import CollectiveIntent
from lightning_d9m.horovod.environment import import_horovod
from lightning_d9m.horovod.strategy import HorovodDeterministicStrategy


@pytest.fixture
def strategy(monkeypatch):
    """Return a strategy on rank 2 of 3 of one host, with no gradients to reduce."""
    monkeypatch.setenv("HOROVOD_RANK", "2")
    monkeypatch.setenv("HOROVOD_LOCAL_RANK", "2")
    made = HorovodDeterministicStrategy(parallel_devices=[torch.device("cuda", n) for n in (0, 1)])
    made._sums = SimpleNamespace(holds=lambda _: False)
    made._lightning_module = SimpleNamespace(trainer=SimpleNamespace(training=True))
    return made


def use_the_communicator(strategy):
    return strategy.communicator


def use_a_device(strategy):
    return strategy.root_device


def step(strategy):
    strategy.optimizer_step(torch.optim.SGD([torch.nn.Parameter(torch.ones(2, 3))]), nullcontext)


def report_a_stray_gradient(strategy):
    strategy._refuse_stray("layer.weight")


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (use_the_communicator, "Horovod has not started yet"),
        (use_a_device, r"Rank 2 has local rank 2.*names 2 devices"),
        (step, r"a parameter of shape \(2, 3\) that was not in the LightningModule"),
        (report_a_stray_gradient, "'layer.weight' got a gradient outside Lightning's backward"),
    ],
)
def test_the_strategy_refuses(strategy, act, words):
    with pytest.raises(SettingError, match=words):
        act(strategy)


def test_a_horovod_that_is_not_there(monkeypatch):
    monkeypatch.setitem(sys.modules, "horovod.torch", None)
    with pytest.raises(SettingError, match=r"Horovod cannot be imported.*d9m install-horovod"):
        import_horovod()


@pytest.fixture
def make_communicator(monkeypatch):
    """Return a function that makes the communicator of two ranks; the other one is faked."""

    def make(*, agree):
        communicator = Communicator(SimpleNamespace(rank=lambda: 0, size=lambda: 2))
        monkeypatch.setattr(communicator, "_is_common", lambda *_: agree)
        monkeypatch.setattr(
            communicator, "gather_objects", lambda intent: [intent, ("the end", ())]
        )
        return communicator

    return make


def test_ranks_that_do_different_things(make_communicator):
    communicator = make_communicator(agree=False)
    with pytest.raises(RanksDisagreeError, match="rank 0: a barrier\n  rank 1: the end"):
        communicator.agree(CollectiveIntent("a barrier"))


def test_ranks_that_end_together_exchange_nothing_more(make_communicator):
    communicator = make_communicator(agree=True)
    communicator.announce(ValueError("all have it"))
    assert str(communicator.broken) == "This rank has ended its part of the run."
