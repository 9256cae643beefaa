"""Collectives in the order of streams: the routes of tensors, with a group that stands for NCCL."""

import time
from types import SimpleNamespace

import pytest
import torch
from torch import distributed

from lightning_d9m.errors import SettingError
from lightning_d9m.horovod.communication import nccl_transport
from lightning_d9m.horovod.communication.nccl_transport import NcclTransport, StreamPending


class LikeCuda(torch.Tensor):
    """A CPU tensor that says that it is on a CUDA device."""

    is_cuda = property(lambda _: True)


class Work:
    """A collective that is complete when ``done`` is set."""

    def __init__(self):
        self.done = False
        self.waits = 0

    def is_completed(self):
        return self.done

    def wait(self):
        self.waits += 1


class Group:
    """Notes the calls."""

    Options = SimpleNamespace

    def __init__(self, store, rank, size, options):
        self.given = (store, rank, size, options._timeout.total_seconds())
        self.calls = []
        self.work = Work()

    def __getattr__(self, name):
        def call(*arguments):
            self.calls.append((name, arguments))
            return self.work

        return call


@pytest.fixture
def transport(monkeypatch):
    monkeypatch.setattr(distributed, "ProcessGroupNCCL", Group, raising=False)
    monkeypatch.setattr(nccl_transport, "connect_store", lambda rank, gather, timeout: "store")
    made = NcclTransport(0, 1, lambda value: [value], limit_seconds=30)
    group = made._nccl
    yield made
    made.close()
    assert group.calls[-1][0] == "abort"


def test_cuda_tensors_go_to_nccl_and_others_to_gloo(transport):
    group, there = transport._nccl, torch.ones(4).as_subclass(LikeCuda)
    assert group.given == ("store", 0, 1, 30.0)
    assert transport.sum(there, "a").get_result() is there
    transport.broadcast(there, "b")
    gathered = transport.gather(there, "c").get_result()
    assert [name for name, _ in group.calls] == ["allreduce", "broadcast", "allgather"]
    assert group.calls[2][1][0][0].data_ptr() == gathered.data_ptr()
    here = torch.ones(4)
    for start in (transport.sum, transport.broadcast, transport.gather, transport.minimize):
        pending = start(here, "d")
        assert pending.is_done_within(10)
        assert torch.equal(pending.get_result(), here)
    assert len(group.calls) == 3


def test_the_host_does_not_wait_for_a_result():
    """The stream does; ``wait`` with a timeout would end the group."""
    work = Work()
    pending = StreamPending(work, torch.ones(1))
    assert torch.equal(pending.get_result(), torch.ones(1))
    assert work.waits == 1
    began = time.monotonic()
    assert not pending.is_done_within(0.01)
    assert time.monotonic() - began >= 0.01
    work.done = True
    assert pending.is_done_within(0.0)


def test_a_rank_without_the_store_is_named_on_every_rank(monkeypatch):
    monkeypatch.setattr(nccl_transport, "connect_store", lambda *_: "store")
    with pytest.raises(SettingError, match="Rank 1 cannot connect to the store on rank 0"):
        NcclTransport(0, 2, lambda value: [value, False], limit_seconds=30)
