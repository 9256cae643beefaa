"""Variables, torch's flags and threads: set in time, found if changed, and restored."""

import gc
import os
import pickle
import sys

import pytest
import torch
import torch._inductor.config  # `use_deterministic_algorithms` loads it, and switches it too
from hypothesis import given
from hypothesis import strategies as st
from torch_features import needs_all_flags, needs_compiler_flag

from lightning_d9m import SettingError, TooLateError, deterministic, digest
from lightning_d9m.engine.control import environment
from lightning_d9m.engine.control.environment import (
    CUBLAS,
    FLASH_ATTENTION,
    INDUCTOR,
    NCCL,
    TRANSFORMER_ENGINE,
    EarlyVariables,
    algorithms_switched,
    allows_nvls,
    capture_flags,
    find_changed_flags,
    read_threads,
    restore_flags,
    threads_pinned,
    wanted_flags,
)

SET = {
    CUBLAS: ":4096:8",
    NCCL: "^NVLS,NVLSTree",
    INDUCTOR: "1",
    FLASH_ATTENTION: "1",
    TRANSFORMER_ENGINE: "0",
}


@pytest.fixture
def start(monkeypatch):
    """Let no variable be set; return a function that makes CUDA or NCCL count as started."""
    for name in SET:
        monkeypatch.delenv(name, raising=False)
    for name in ("_holders", "_previous", "_in_force"):
        monkeypatch.setattr(environment, name, type(getattr(environment, name))())

    def started(library):
        if library == "CUDA":
            monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
            return
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
        backends = f"cpu:gloo,cuda:{library.lower()}"
        monkeypatch.setattr(torch.distributed, "get_backend_config", lambda: backends)

    return started


def values():
    return {name: os.environ[name] for name in SET if name in os.environ}


@pytest.mark.usefixtures("start")
def test_variables_are_set_until_the_last_holder_gives_them_up():
    first, second, forgotten = (EarlyVariables() for _ in range(3))
    assert values() == {}
    for holder in (first, first, second, forgotten):
        holder.set()
        assert values() == SET
    first.restore()
    first.restore()
    pickle.loads(pickle.dumps(second)).restore()  # noqa: S301 - our own, in another process
    second.restore()
    assert values() == SET
    del forgotten, holder
    gc.collect()
    assert values() == {}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (CUBLAS, ":4096:2"),  # torch raises at the first matrix product with it
        (NCCL, "NVLS"),
        (INDUCTOR, "0"),
        (FLASH_ATTENTION, "0"),
        (TRANSFORMER_ENGINE, "1"),
    ],
)
@pytest.mark.usefixtures("start")
def test_a_value_that_allows_nondeterminism_is_refused(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    with pytest.raises(SettingError, match=f"{name} is '{value}'.*Unset it"):
        EarlyVariables().set()
    assert values() == {name: value}  # nothing else was touched


@pytest.mark.parametrize(("library", "name"), [("CUDA", CUBLAS), ("NCCL", NCCL)])
@pytest.mark.parametrize("value", [None, "NVLS"])
def test_too_late_is_an_error_that_says_what_to_do(monkeypatch, start, library, name, value):
    early = EarlyVariables()
    early.set()
    early.restore()
    if value is not None:
        monkeypatch.setenv(name, value)
    start("GLOO")
    start(library)
    with pytest.raises(TooLateError) as caught:
        early.set()
    message = str(caught.value)
    assert message.startswith(f"{library} started in this process while {name} was ")
    assert "lightning_d9m.enable() at the top" in message
    assert f"{name}=" in message


@pytest.mark.parametrize(
    ("library", "name", "value"), [("CUDA", CUBLAS, ":16:8"), ("NCCL", NCCL, "Ring")]
)
def test_what_a_library_has_read_is_in_force_in_later_sessions(
    monkeypatch, start, library, name, value
):
    """The ledger records the variable, so it must say what the library has read."""
    monkeypatch.setenv(name, value)
    early = EarlyVariables()
    early.set()
    start("GLOO")
    start(library)
    early.restore()
    monkeypatch.delenv(name)
    for _ in range(2):
        early.set()
        assert os.environ[name] == value
        early.restore()
        assert values() == {}


def test_whether_a_value_lets_nccl_choose_nvls():
    allowed = ("NVLS", "Tree, NVLS", "nvlstree,ring", "^Tree", "^NVLSTree", "^NVLS")
    allowed += ("ring;allgather:nvls", "^NVLS, NVLSTree")
    # Collectives that no part names keep every algorithm.
    allowed += ("allreduce:ring", "allreduce:^nvls,nvlstree;broadcast:ring")
    refused = ("Ring", "^NVLS,NVLSTree", "^nvlstree,nvls,tree;broadcast:ring", "")
    assert [*map(allows_nvls, allowed + refused)] == [True] * len(allowed) + [False] * len(refused)


# Threads of other tests change what a pinned number does.
ALONE = pytest.mark.alone
NAMES = sorted(capture_flags())
STATES = st.fixed_dictionaries({name: st.booleans() for name in NAMES}).map(
    # torch has no warn_only without the mode itself.
    lambda flags: (
        flags
        | {
            "torch.deterministic_warn_only": flags["torch.deterministic_warn_only"]
            and flags["torch.deterministic_algorithms"]
        }
    )
)


@pytest.fixture(autouse=True)
def flags_restored():
    before = capture_flags()
    yield
    restore_flags(before)


@given(STATES, st.booleans())
def test_any_state_is_switched_and_restored_also_on_error(state, fill):
    restore_flags(state)
    assert capture_flags() == state
    wanted = wanted_flags(fill_uninitialized_memory=fill)
    with pytest.raises(ZeroDivisionError), algorithms_switched(wanted):
        assert capture_flags().items() <= wanted.items()
        assert not find_changed_flags(wanted)
        raise ZeroDivisionError
    assert capture_flags() == state


@needs_all_flags
def test_torch_computes_with_deterministic_kernels_and_times_none():
    with algorithms_switched(wanted_flags(fill_uninitialized_memory=False)):
        assert torch.get_deterministic_debug_mode() == 2  # others raise
        assert not torch.utils.deterministic.fill_uninitialized_memory
        assert torch.backends.cudnn.deterministic
        assert not torch.backends.cudnn.benchmark
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        assert torch.backends.mkldnn.deterministic
        assert torch._inductor.config.deterministic


@pytest.mark.parametrize("name", NAMES)
def test_each_flag_that_somebody_switches_is_found(name):
    with deterministic() as opened:
        flags = capture_flags()
        restore_flags(flags | {name: not flags[name]})
        with pytest.raises(SettingError, match=f"The flag {name} is {not flags[name]}"):
            opened.verify()


@pytest.mark.parametrize("value", ["", "0", "1"])
@needs_compiler_flag
def test_a_compiler_that_is_not_loaded_counts_as_its_variable_says(monkeypatch, value):
    monkeypatch.delitem(sys.modules, "torch._inductor.config")
    monkeypatch.setenv(INDUCTOR, value)
    assert capture_flags()["inductor.deterministic"] is (value == "1")


SIZE = 1000  # small enough for the allocator to hand the same memory out again


def read_uninitialized(byte, *, fill):
    """Leave bytes in memory, then read a new tensor that nobody has written to."""
    with deterministic(fill_uninitialized_memory=fill):
        for _ in range(8):
            torch.full((4 * SIZE,), byte, dtype=torch.uint8)
        return [digest(torch.empty(SIZE)) for _ in range(8)]


def test_a_program_that_reads_uninitialized_memory_is_exact_with_the_fill_alone():
    assert read_uninitialized(1, fill=False) != read_uninitialized(2, fill=False)
    found = [read_uninitialized(byte, fill=True) for byte in (1, 2, 3)]
    assert found[0] == found[1] == found[2]
    assert len(set(found[0])) == 1


@ALONE
def test_a_product_differs_between_numbers_of_threads_unless_one_is_pinned(set_threads):
    numbers = torch.randn(1_000_003, generator=torch.Generator().manual_seed(0))
    factors = 1 + numbers * 1e-4
    free, pinned = [], set()
    for number in (1, 2):
        set_threads(number)
        free.append(digest(factors.prod()))  # one reduction, cut into a part for each thread
        with deterministic(threads=2):
            pinned.add(digest(factors.prod()))
        assert torch.get_num_threads() == number
    assert free[0] != free[1]
    assert len(pinned) == 1


@ALONE
def test_a_number_that_somebody_changes_is_found(set_threads):
    with deterministic(threads=2) as pinned:
        pinned.verify()
        set_threads(1)
        with pytest.raises(SettingError, match="1 CPU threads are in use, and 2 were pinned"):
            pinned.verify()
        with deterministic() as free:
            free.verify()


@pytest.mark.parametrize("value", ["TRUE", "1"])
def test_a_number_that_openmp_varies_is_refused(monkeypatch, value):
    """Under load, with two threads pinned, a product was found to be that of one thread."""
    monkeypatch.setenv("OMP_DYNAMIC", value)
    expected = pytest.raises(SettingError, match=f"OMP_DYNAMIC is '{value}'.*OMP_DYNAMIC=false")
    with expected, threads_pinned(None):
        pass
    monkeypatch.setenv("OMP_DYNAMIC", "false")
    with threads_pinned(None):
        pass


@pytest.mark.parametrize(
    ("text", "number"), [("3", 3), ("", None), ("0", None), (" 2,1", 2), ("many", None)]
)
def test_the_number_of_the_user_is_that_at_the_start(monkeypatch, text, number):
    monkeypatch.setattr(environment, "_NUMBER_AT_START", text)
    monkeypatch.setenv("OMP_NUM_THREADS", "17")
    assert read_threads() == number
