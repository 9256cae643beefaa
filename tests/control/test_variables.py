"""Variables are set before libraries read them, restored, and an error when it is too late."""

import gc
import os
import pickle

import pytest

from lightning_d9m import SettingError, TooLateError
from lightning_d9m.control import variables
from lightning_d9m.control.variables import CUBLAS, INDUCTOR, NCCL, EarlyVariables, allows_nvls


@pytest.fixture(autouse=True)
def fresh_process(monkeypatch):
    """Let the process begin with no variable set and no library started."""
    for name in (CUBLAS, NCCL, INDUCTOR):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(variables, "_state", variables._State())


@pytest.fixture
def start(monkeypatch):
    """Return a function that makes CUDA or NCCL count as started."""

    def started(library, *, now=True):
        monkeypatch.setattr(variables, f"{library}_started", lambda: now)

    return started


def values():
    return [os.environ.get(name) for name in (CUBLAS, NCCL, INDUCTOR)]


def test_sets_and_restores():
    early = EarlyVariables()
    assert values() == [None, None, None]
    early.set()
    early.set()
    assert values() == [":4096:8", "^NVLS,NVLSTree", "1"]
    early.restore()
    early.restore()
    assert values() == [None, None, None]


def test_the_last_holder_restores():
    first, second = EarlyVariables(), EarlyVariables()
    first.set()
    second.set()
    first.restore()
    assert values()[0] == ":4096:8"
    second.restore()
    assert values() == [None, None, None]


def test_a_holder_that_is_forgotten_restores():
    early = EarlyVariables()
    early.set()
    del early
    gc.collect()
    assert values() == [None, None, None]


def test_a_copy_in_another_process_restores_nothing():
    early = EarlyVariables()
    early.set()
    pickle.loads(pickle.dumps(early)).restore()  # noqa: S301 - our own
    assert values()[0] == ":4096:8"
    early.restore()


@pytest.mark.parametrize("value", [":4096:8", ":16:8", ":4096:2"])
def test_a_valid_workspace_of_the_users_is_kept(monkeypatch, value):
    monkeypatch.setenv(CUBLAS, value)
    early = EarlyVariables()
    early.set()
    assert os.environ[CUBLAS] == value
    early.restore()
    assert os.environ[CUBLAS] == value


@pytest.mark.parametrize(("name", "value"), [(CUBLAS, ":0:0"), (NCCL, "NVLS")])
def test_a_value_that_allows_nondeterminism_is_refused(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    with pytest.raises(SettingError, match=f"{name} is '{value}'.*Unset it"):
        EarlyVariables().set()
    assert values().count(None) == 2  # nothing else was touched


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


@pytest.mark.parametrize(
    ("library", "name", "good"), [("cuda", CUBLAS, ":16:8"), ("nccl", NCCL, "Ring")]
)
def test_a_library_that_started_under_a_good_value_is_fine(monkeypatch, start, library, name, good):
    monkeypatch.setenv(name, good)
    start(library)
    early = EarlyVariables()
    early.set()
    assert os.environ[name] == good
    early.restore()


@pytest.mark.parametrize("library", ["cuda", "nccl"])
def test_a_library_that_started_in_an_earlier_session_is_fine(start, library):
    """The second fit of a program: the variable was restored, what the library has read stays."""
    for _ in range(3):
        early = EarlyVariables()
        early.set()
        start(library)
        early.restore()
        assert values() == [None, None, None]


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
        ("Tree,Ring", False),
        ("ring", False),
        ("NVLS", True),
        ("Tree, NVLS", True),
        ("NVLSTree", True),
        ("nvlstree,ring", True),
        ("^NVLS", False),
        ("^NVLS,NVLSTree", False),
        ("^Tree", True),
        ("^NVLSTree", True),
        ("allreduce:ring", False),
        ("allreduce:ring;allgather:nvls", True),
        ("allreduce:^nvls;broadcast:ring", False),
        ("", False),
    ],
)
def test_whether_a_value_lets_nccl_choose_nvls(value, allowed):
    assert allows_nvls(value) is allowed
