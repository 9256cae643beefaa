"""Environment variables, ranks and options, without processes."""

import os
import socket
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch

from lightning_d9m.errors import SettingError, StackDifferenceError, TooLateError
from lightning_d9m.horovod import environment as settings
from lightning_d9m.horovod.environment import (
    PINNED,
    check_rank_stacks,
    connect_store,
    describe_rank,
    set_variables,
)
from lightning_d9m.horovod.strategy import (
    HorovodDeterministicStrategy,
    HorovodEnvironment,
    RankInfo,
    read_rank_info,
)


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    """Start without any of the variables, in a process that has not started Horovod."""
    for name in list(os.environ):
        if name.startswith(("GLOO_", "HOROVOD_", "NCCL_", "OMPI_", "PMI_")):
            monkeypatch.delenv(name)
    monkeypatch.setattr(settings, "_started_with", None)


def set_and_remove(*, initialized):
    """Set the variables and remove them, as a run does."""
    for name in set_variables(initialized=initialized, stall_seconds=60):
        del os.environ[name]


def test_variables_are_set_and_restored(monkeypatch):
    """The network interface is that of horovodrun."""
    monkeypatch.setenv("HOROVOD_GLOO_IFACE", "eth7")
    added = set_variables(initialized=False, stall_seconds=60)
    assert os.environ["HOROVOD_FUSION_THRESHOLD"] == "0"
    assert os.environ["HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"] == "60"
    assert os.environ["NCCL_ALGO"] == "Ring"
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"
    for name in added:
        del os.environ[name]
    assert not [name for name in os.environ if name.startswith(("HOROVOD_C", "GLOO_", "NCCL_"))]


def test_a_users_choice_of_nccl_stays(monkeypatch):
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    set_and_remove(initialized=False)
    assert os.environ["NCCL_ALGO"] == "Tree"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HOROVOD_FUSION_THRESHOLD", "67108864"),
        ("HOROVOD_AUTOTUNE", "1"),
        ("HOROVOD_ELASTIC", "1"),
        ("HOROVOD_ENABLE_ASYNC_COMPLETION", "1"),
        ("NCCL_ALGO", "NVLS"),
    ],
)
def test_contradicting_variables_are_refused_by_name(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    with pytest.raises(
        SettingError,
        match=f"{name} is .*(but deterministic training needs|by NVLS|elastic Horovod)",
    ):
        set_variables(initialized=False, stall_seconds=60)


@pytest.mark.parametrize("name", ["HOROVOD_FUSION_THRESHOLD", "HOROVOD_DISABLE_GROUP_FUSION"])
def test_horovod_that_started_without_a_variable_is_too_late(monkeypatch, name):
    for other, value in PINNED.items():
        if other != name:
            monkeypatch.setenv(other, value)
    with pytest.raises(TooLateError, match=name):
        set_variables(initialized=True, stall_seconds=60)


def test_a_second_run_uses_the_running_horovod():
    """The variables are restored after the first run, yet Horovod has read them."""
    before = dict(os.environ)
    set_and_remove(initialized=False)
    assert os.environ == before
    set_and_remove(initialized=True)
    assert os.environ == before


def test_a_horovod_that_the_user_started_with_the_variables_is_accepted(monkeypatch):
    for name, value in PINNED.items():
        monkeypatch.setenv(name, value)
    set_and_remove(initialized=True)


def test_ranks_that_differ_are_named_with_the_field():
    here = describe_rank({"op": "average"})
    check_rank_stacks([here, dict(here)])
    there = here | {"strategy.op": "sum"}
    with pytest.raises(StackDifferenceError, match=r"Rank 2 .*\n  strategy.op") as caught:
        check_rank_stacks([here, here, there])
    assert caught.value.differences == (("strategy.op", "average", "sum"),)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, RankInfo(0, 1, 0, 0)),
        (
            {"HOROVOD_RANK": "3", "HOROVOD_SIZE": "4", "HOROVOD_LOCAL_RANK": "1"},
            RankInfo(3, 4, 1, 0),
        ),
        (
            {
                "OMPI_COMM_WORLD_RANK": "5",
                "OMPI_COMM_WORLD_SIZE": "8",
                "OMPI_COMM_WORLD_LOCAL_RANK": "1",
            },
            RankInfo(5, 8, 1, 0),
        ),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, RankInfo(1, 2, 0, 0)),
    ],
)
def test_ranks_are_read_from_the_launcher(variables, expected):
    assert read_rank_info(variables) == expected


def test_environment_follows_horovod(monkeypatch):
    monkeypatch.setenv("HOROVOD_RANK", "1")
    monkeypatch.setenv("HOROVOD_SIZE", "2")
    environment = HorovodEnvironment()
    assert environment.detect()
    assert (environment.global_rank(), environment.world_size()) == (1, 2)
    places = {"rank": 3, "size": 4, "local_rank": 1, "cross_rank": 1}
    environment.update(SimpleNamespace(**{n: lambda v=v: v for n, v in places.items()}))
    assert environment.global_rank() == 3
    assert environment.node_rank() == 1
    assert environment.creates_processes_externally


@pytest.mark.parametrize("options", [{"op": "max"}, {"compression": "int8"}, {"bucket_bytes": -1}])
def test_strategy_refuses_unknown_options(options):
    with pytest.raises(SettingError, match=next(iter(options))):
        HorovodDeterministicStrategy(**options)


@pytest.mark.parametrize(
    ("visible", "devices", "local_rank", "expected"),
    [
        (4, 1, 2, "cuda:2"),  # devices=1 for each process: the one of its number
        (1, 1, 2, "cuda:0"),  # the launcher shows each process its own
        (4, 2, 1, "cuda:3"),  # devices=[2, 3]
    ],
)
def test_root_device_is_that_of_the_local_rank(monkeypatch, visible, devices, local_rank, expected):
    monkeypatch.setenv("HOROVOD_RANK", str(local_rank))
    monkeypatch.setenv("HOROVOD_LOCAL_RANK", str(local_rank))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    chosen = (
        [torch.device("cuda", 0)] if devices == 1 else [torch.device("cuda", i) for i in (2, 3)]
    )
    strategy = HorovodDeterministicStrategy(parallel_devices=chosen)
    assert str(strategy.root_device) == expected


def test_more_processes_than_devices_are_refused(monkeypatch):
    monkeypatch.setenv("HOROVOD_RANK", "2")
    monkeypatch.setenv("HOROVOD_LOCAL_RANK", "2")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    strategy = HorovodDeterministicStrategy(parallel_devices=[torch.device("cuda", 0)])
    with pytest.raises(SettingError, match="only 2 CUDA devices"):
        _ = strategy.root_device


def test_a_rank_that_cannot_connect_says_which_setting_helps():
    with socket.socket() as unused:  # bound, and nothing listens
        unused.bind(("127.0.0.1", 0))
        address = list(f"127.0.0.1 {unused.getsockname()[1]}".encode())
        sent = torch.tensor(address + [0] * (128 - len(address)), dtype=torch.uint8)
        horovod = SimpleNamespace(rank=lambda: 1, broadcast=lambda *_, **__: sent)
        with pytest.raises(SettingError, match=r"Rank 1 cannot connect to rank 0 at 127\.0\.0\.1:"):
            connect_store(horovod, timedelta(seconds=1))
