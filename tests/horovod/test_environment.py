"""Environment variables, ranks and options, without processes."""

import os
import socket
import sys
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch

from lightning_d9m.engine.control import environment
from lightning_d9m.engine.control.environment import EarlyVariables
from lightning_d9m.errors import SettingError, StackDifferenceError, TooLateError
from lightning_d9m.integrations.strategies.horovod.environment import (
    PINNED,
    compare_stacks,
    connect_store,
    list_variables,
)
from lightning_d9m.integrations.strategies.horovod.strategy import (
    HorovodDeterministicStrategy,
    HorovodEnvironment,
)


@pytest.fixture(autouse=True)
def running(monkeypatch):
    """Start without any of the variables; Horovod counts as started if the list is not empty."""
    for name in list(os.environ):
        if name.startswith(("GLOO_", "HOROVOD_", "NCCL_", "OMPI_", "PMI_")):
            monkeypatch.delenv(name)
    monkeypatch.setattr(environment, "_in_force", {})
    found = []
    horovod = SimpleNamespace(is_initialized=lambda: bool(found))
    monkeypatch.setitem(sys.modules, "horovod.torch", horovod)
    return found


def test_variables_are_set_and_restored(monkeypatch):
    """The network interface is that of horovodrun. The user's values stay."""
    monkeypatch.setenv("HOROVOD_GLOO_IFACE", "eth7")
    monkeypatch.setenv("HOROVOD_CYCLE_TIME", "9")
    monkeypatch.setenv("NCCL_PROTO", "LL")
    before, variables = dict(os.environ), EarlyVariables(list_variables(60))
    variables.set()
    assert os.environ["HOROVOD_FUSION_THRESHOLD"] == "0"
    assert os.environ["HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"] == "60"
    assert os.environ["HOROVOD_CYCLE_TIME"] == "9"
    assert (os.environ["NCCL_ALGO"], os.environ["NCCL_PROTO"]) == ("Ring", "LL")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"
    variables.restore()
    assert os.environ == before


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("HOROVOD_FUSION_THRESHOLD", "67108864", "0"),
        ("HOROVOD_AUTOTUNE", "1", "0"),
        ("HOROVOD_ELASTIC", "1", "0"),
        ("HOROVOD_ENABLE_ASYNC_COMPLETION", "1", "0"),
        ("NCCL_ALGO", "NVLS", "Ring"),
    ],
)
def test_contradicting_variables_are_refused_by_name(monkeypatch, name, value, wanted):
    monkeypatch.setenv(name, value)
    words = f"{name} is '{value}'.*Unset it, or set {name}={wanted}"
    with pytest.raises(SettingError, match=words):
        EarlyVariables(list_variables(60)).set()


@pytest.mark.parametrize("name", ["HOROVOD_FUSION_THRESHOLD", "HOROVOD_DISABLE_GROUP_FUSION"])
def test_horovod_that_started_without_a_variable_is_too_late(monkeypatch, running, name):
    for other in PINNED:
        if other.name != name:
            monkeypatch.setenv(other.name, other.wanted)
    running.append(True)
    with pytest.raises(TooLateError, match=rf"Horovod started .* {name} was not set.*hvd.init\(\)"):
        EarlyVariables(list_variables(60)).set()


def test_a_second_run_uses_the_running_horovod(running):
    """The variables are restored after the first run, yet Horovod has read them."""
    before = dict(os.environ)
    for _ in range(2):
        variables = EarlyVariables(list_variables(60))
        variables.set()
        running.append(True)
        variables.restore()
        assert os.environ == before


def test_ranks_that_differ_are_named_with_the_field():
    compare_stacks({"op": "average"}, lambda own: [own, dict(own)])
    with pytest.raises(StackDifferenceError, match=r"Rank 2 .*\n  strategy.op") as caught:
        compare_stacks({"op": "average"}, lambda own: [own, own, own | {"strategy.op": "sum"}])
    assert caught.value.differences == (("strategy.op", "average", "sum"),)


def test_a_session_and_the_strategy_share_a_variable(monkeypatch):
    """What NCCL has read is remembered, also if the session ends first, as after an exception."""
    session, variables = EarlyVariables(), EarlyVariables(list_variables(60))
    session.set()
    variables.set()
    assert os.environ["NCCL_ALGO"] == "^NVLS,NVLSTree"
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_backend_config", lambda: "cuda:nccl")
    session.restore()
    variables.restore()
    assert "NCCL_ALGO" not in os.environ
    session.set()  # not too late
    os.environ["HOROVOD_AUTOTUNE"] = "1"
    with pytest.raises(SettingError, match="HOROVOD_AUTOTUNE is '1'"):
        variables.set()
    del os.environ["HOROVOD_AUTOTUNE"]
    session.restore()


def test_horovod_needs_its_variables_without_control_too(monkeypatch):
    monkeypatch.setenv("LIGHTNING_D9M_CONTROL", "off")
    monkeypatch.setenv("HOROVOD_GLOO_IFACE", "eth7")
    variables = EarlyVariables(list_variables(60))
    variables.set()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"
    variables.restore()


OMPI = "OMPI_COMM_WORLD_"


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, (0, 1, 0, 0)),
        ({"HOROVOD_RANK": "3", "HOROVOD_SIZE": "4", "HOROVOD_LOCAL_RANK": "1"}, (3, 4, 1, 0)),
        ({f"{OMPI}RANK": "5", f"{OMPI}SIZE": "8", f"{OMPI}LOCAL_RANK": "1"}, (5, 8, 1, 0)),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, (1, 2, 0, 0)),
    ],
)
def test_ranks_are_read_from_the_launcher_and_then_from_horovod(variables, expected, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    ranks = HorovodEnvironment()
    assert ranks.detect()
    assert ranks.creates_processes_externally
    named = (ranks.global_rank(), ranks.world_size())
    assert (*named, ranks.local_rank(), ranks.node_rank()) == expected
    places = {"rank": 3, "size": 4, "local_rank": 1, "cross_rank": 1}
    ranks.update(SimpleNamespace(**{n: lambda v=v: v for n, v in places.items()}))
    assert (ranks.global_rank(), ranks.node_rank()) == (3, 1)


@pytest.mark.parametrize(
    ("visible", "devices", "local_rank", "expected"),
    [
        pytest.param(4, [0], 2, "cuda:2", id="devices=1: the one of its number"),
        pytest.param(1, [0], 2, "cuda:0", id="the launcher shows each process its own"),
        pytest.param(4, [2, 3], 1, "cuda:3", id="named devices"),
        pytest.param(2, [0], 2, None, id="fewer devices than processes"),
        pytest.param(4, [2, 3], 2, None, id="fewer named devices than processes"),
    ],
)
def test_root_device_is_that_of_the_local_rank(monkeypatch, visible, devices, local_rank, expected):
    monkeypatch.setenv("HOROVOD_RANK", str(local_rank))
    monkeypatch.setenv("HOROVOD_LOCAL_RANK", str(local_rank))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    chosen = [torch.device("cuda", number) for number in devices]
    strategy = HorovodDeterministicStrategy(parallel_devices=chosen)
    if expected is None:
        with pytest.raises(SettingError, match="has local rank 2, and there are only 2 CUDA"):
            strategy.root_device  # noqa: B018 - it raises
    else:
        assert str(strategy.root_device) == expected


def test_a_rank_that_cannot_connect_says_which_setting_helps():
    with socket.socket() as unused:  # bound, and nothing listens
        unused.bind(("127.0.0.1", 0))
        address = list(f"127.0.0.1 {unused.getsockname()[1]}".encode())
        sent = torch.tensor(address + [0] * (128 - len(address)), dtype=torch.uint8)
        horovod = SimpleNamespace(rank=lambda: 1, broadcast=lambda *_, **__: sent)
        with pytest.raises(SettingError, match=r"Rank 1 cannot connect to rank 0 at 127\.0\.0\.1:"):
            connect_store(horovod, timedelta(seconds=1))
