"""Errors of the strategy, raised in this process, and what ranks say that do different things."""

import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from rank_threads import RANKS, Threads

from lightning_d9m.errors import RanksDisagreeError, SettingError
from lightning_d9m.horovod.environment import import_horovod
from lightning_d9m.horovod.strategy import HorovodDeterministicStrategy
from lightning_d9m.ranks.ranks import Ranks, agree


@pytest.fixture
def strategy(monkeypatch):
    """Return a strategy on rank 2 of 3 of one host, with no gradients to reduce."""
    monkeypatch.setenv("HOROVOD_RANK", "2")
    monkeypatch.setenv("HOROVOD_LOCAL_RANK", "2")
    made = HorovodDeterministicStrategy(parallel_devices=[torch.device("cuda", n) for n in (0, 1)])
    made._sums = SimpleNamespace(holds=lambda _: False)
    made._lightning_module = SimpleNamespace(trainer=SimpleNamespace(training=True))
    return made


def use_a_device(strategy):
    return strategy.root_device


def step(strategy):
    strategy.optimizer_step(torch.optim.SGD([torch.nn.Parameter(torch.ones(2, 3))]), nullcontext)


def synchronize(strategy):
    strategy._layer_sync = object()
    strategy.parallel_devices = [torch.device("cpu")]
    strategy.setup(None)


def report_a_stray_gradient(strategy):
    strategy._refuse_stray("layer.weight")


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (use_a_device, r"Rank 2 has local rank 2.*names 2 devices"),
        (step, r"a parameter of shape \(2, 3\) that was not in the LightningModule"),
        (synchronize, "needs GPUs, because torch's SyncBatchNorm computes on a GPU"),
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


def announce(*announced):
    """Return the error of each rank, which announces an activity and items; None without one."""
    threads = Threads()

    def one(rank):
        try:
            agree(Ranks(rank, threads.exchange_of(rank)), *announced[rank])
        except RanksDisagreeError as error:
            return error

    with ThreadPoolExecutor(RANKS) as pool:
        return list(pool.map(one, range(RANKS)))


def test_ranks_that_do_different_things_find_each_other():
    assert announce(*[("the backward pass", ("a", "b"))] * RANKS) == [None] * RANKS
    found = announce(("the backward pass",), ("the barrier 'x'",), ("the backward pass",))
    for error in found:
        assert "  rank 0: the backward pass\n  rank 1: the barrier 'x'\n  rank 2:" in str(error)
        assert error.intents == ("the backward pass", "the barrier 'x'", "the backward pass")


def test_different_parts_are_named_with_their_ranks():
    names = [f"p{number:02}" for number in range(20)]
    found = announce(("a broadcast", ["a", *names]), ("a broadcast", ["a"]), ("a broadcast", ["a"]))
    for error in found:
        assert "what takes part in a broadcast:\n  p00: yes on rank 0; no on rank 1, 2" in str(
            error
        )
        assert str(error).endswith("and 12 more")
