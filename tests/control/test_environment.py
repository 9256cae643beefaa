"""Variables are set before libraries read them, restored, and an error when it is too late."""

import gc
import os
import pickle

import pytest
import torch

from lightning_d9m import SettingError, TooLateError
from lightning_d9m.control import environment
from lightning_d9m.control.environment import (
    CUBLAS,
    FLASH_ATTENTION,
    INDUCTOR,
    NCCL,
    TRANSFORMER_ENGINE,
    EarlyVariables,
    allows_nvls,
    nccl_started,
)

NAMES = (CUBLAS, NCCL, INDUCTOR, FLASH_ATTENTION, TRANSFORMER_ENGINE)


@pytest.fixture(autouse=True)
def fresh_process(monkeypatch):
    """Let the process begin with no variable set and no library started."""
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(environment, "_state", environment._VariableState())


@pytest.fixture
def start(monkeypatch):
    """Return a function that makes CUDA or NCCL count as started."""

    def started(library, *, now=True):
        monkeypatch.setattr(environment, f"{library}_started", lambda: now)

    return started


UNSET = [None] * len(NAMES)


def values():
    return [os.environ.get(name) for name in NAMES]


def test_sets_and_restores():
    early = EarlyVariables()
    assert values() == UNSET
    early.set()
    early.set()
    assert values() == [":4096:8", "^NVLS,NVLSTree", "1", "1", "0"]
    early.restore()
    early.restore()
    assert values() == UNSET


def test_the_last_holder_restores():
    first, second = EarlyVariables(), EarlyVariables()
    first.set()
    second.set()
    first.restore()
    assert values()[0] == ":4096:8"
    pickle.loads(pickle.dumps(second)).restore()  # noqa: S301 - our own, in another process
    assert values()[0] == ":4096:8"
    second.restore()
    assert values() == UNSET


def test_a_holder_that_is_forgotten_restores():
    early = EarlyVariables()
    early.set()
    del early
    gc.collect()
    assert values() == UNSET


BAD = [
    (CUBLAS, ":0:0"),
    (CUBLAS, ":4096:2"),  # torch raises at the first matrix product with it
    (NCCL, "NVLS"),
    (INDUCTOR, "0"),
    (FLASH_ATTENTION, "0"),
    (TRANSFORMER_ENGINE, "1"),
]


@pytest.mark.parametrize(("name", "value"), BAD)
def test_a_value_that_allows_nondeterminism_is_refused(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    with pytest.raises(SettingError, match=f"{name} is '{value}'.*Unset it"):
        EarlyVariables().set()
    assert values().count(None) == len(NAMES) - 1  # nothing else was touched


@pytest.mark.parametrize(("library", "name"), [("cuda", CUBLAS), ("nccl", NCCL)])
@pytest.mark.parametrize("value", [None, "NVLS"])
def test_too_late_is_an_error_that_says_what_to_do(monkeypatch, start, library, name, value):
    if value is not None:
        monkeypatch.setenv(name, value)
    start(library)
    with pytest.raises(TooLateError) as caught:
        EarlyVariables().set()
    message = str(caught.value)
    assert message.startswith(f"{library.upper()} started in this process while {name} was ")
    assert "lightning_d9m.enable() at the top" in message
    assert f"{name}=" in message


@pytest.mark.parametrize("library", ["cuda", "nccl"])
def test_a_library_that_started_between_sessions_is_too_late(start, library):
    early = EarlyVariables()
    early.set()
    early.restore()
    start(library)
    with pytest.raises(TooLateError):
        EarlyVariables().set()


@pytest.mark.parametrize(
    ("value", "allowed"),
    [
        ("Ring", False),
        ("NVLS", True),
        ("Tree, NVLS", True),
        ("nvlstree,ring", True),
        ("^NVLS,NVLSTree", False),
        ("^Tree", True),
        ("^NVLSTree", True),
        ("allreduce:ring;allgather:nvls", True),
        ("allreduce:^nvls;broadcast:ring", False),
        ("", False),
    ],
)
def test_whether_a_value_lets_nccl_choose_nvls(value, allowed):
    assert allows_nvls(value) is allowed


@pytest.mark.parametrize("library", ["cuda", "nccl"])
def test_what_a_library_has_read_is_in_force_in_later_sessions(monkeypatch, start, library):
    """The ledger records the variable, so it must say what the library has read."""
    name, value = {"cuda": (CUBLAS, ":16:8"), "nccl": (NCCL, "Ring")}[library]
    monkeypatch.setenv(name, value)
    early = EarlyVariables()
    early.set()
    start(library)
    early.restore()
    monkeypatch.delenv(name)
    for _ in range(2):
        early.set()
        assert os.environ[name] == value
        early.restore()
        assert values() == UNSET


@pytest.mark.parametrize(
    ("backend", "started"),
    [("cpu:gloo,cuda:nccl", True), ("cuda:nccl", True), ("cpu:gloo,cuda:gloo", False)],
)
def test_nccl_is_found_among_the_backends_of_a_group(monkeypatch, backend, started):
    assert not nccl_started()
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_backend_config", lambda: backend)
    assert nccl_started() is started
