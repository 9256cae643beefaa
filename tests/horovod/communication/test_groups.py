"""The groups of a communicator on CUDA, with one that stands for NCCL."""

from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from torch import distributed

from lightning_d9m.errors import SettingError
from lightning_d9m.horovod.communication import communicator, groups
from lightning_d9m.horovod.communication.communicator import Communicator

LIMIT = timedelta(seconds=30)


class Group:
    """Notes the names of the calls."""

    Options = SimpleNamespace

    def __init__(self, store, rank, size, options):
        self.given = (store, rank, size, options._timeout)
        self.calls = []

    def __getattr__(self, name):
        return lambda *_: self.calls.append(name) or SimpleNamespace(wait=lambda: None)


@pytest.fixture
def nccl(monkeypatch):
    monkeypatch.setattr(distributed, "ProcessGroupNCCL", Group, raising=False)
    monkeypatch.setattr(groups, "connect_store", lambda *_: "store")


@pytest.mark.usefixtures("nccl")
def test_a_rank_without_the_store_is_named_on_every_rank():
    with pytest.raises(SettingError, match="Rank 1 cannot connect to the store on rank 0"):
        groups.open_nccl(0, 2, lambda value: [value, False], LIMIT)
    group = groups.open_nccl(1, 2, lambda value: [value, value], LIMIT)
    assert group.given == ("store", 1, 2, LIMIT)


class LikeCuda(torch.Tensor):
    """A CPU tensor that says that it is on a CUDA device."""

    is_cuda = property(lambda _: True)


@pytest.mark.usefixtures("nccl")
def test_nccl_sums_gradients_and_sends_only_what_is_on_a_device(monkeypatch):
    monkeypatch.setattr(communicator, "open_gloo", lambda *_: object())
    hvd = SimpleNamespace(rank=lambda: 0, size=lambda: 2, is_initialized=lambda: True)
    ranks = Communicator(hvd)
    monkeypatch.setattr(ranks, "gather_objects", lambda value: [value, value])
    ranks.connect(limit_seconds=30, device="cuda")
    group = ranks.process_group
    assert isinstance(group, Group)
    there, here = torch.ones(4).as_subclass(LikeCuda), torch.ones(4)
    ranks._broadcast(there, "weights")
    assert group.calls == ["broadcast"]
    gloo = object()
    assert ranks._route(here, gloo, "weights")[0] is gloo
