"""torch's flags: any state is captured and restored, and what somebody switches off is found."""

import sys

import pytest
import torch
import torch._inductor.config  # `use_deterministic_algorithms` loads it, and switches it too
from hypothesis import given
from hypothesis import strategies as st
from lightning_d9m.control.torch_flags import (
    algorithms_switched,
    capture_flags,
    find_changed_flags,
    read_threads,
    restore_flags,
    threads_pinned,
    wanted_flags,
)
from torch_features import needs_all_flags, needs_compiler_flag

from lightning_d9m import SettingError, deterministic, digest
from lightning_d9m.control import torch_flags
from lightning_d9m.control.environment import INDUCTOR

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


@given(STATES, STATES)
def test_any_state_is_captured_and_restored(state, disturbance):
    restore_flags(state)
    captured = capture_flags()
    assert captured == state
    restore_flags(disturbance)
    restore_flags(captured)
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


@given(STATES, st.booleans())
@needs_all_flags
def test_any_state_is_switched_and_restored_also_on_error(state, fill):
    restore_flags(state)
    wanted = wanted_flags(fill_uninitialized_memory=fill)
    with pytest.raises(ZeroDivisionError), algorithms_switched(wanted):
        assert capture_flags() == wanted
        assert not find_changed_flags(wanted)
        raise ZeroDivisionError
    assert capture_flags() == state


@pytest.mark.parametrize("name", NAMES)
def test_each_flag_that_somebody_switches_is_found(name):
    with deterministic() as opened:
        flags = capture_flags()
        restore_flags(flags | {name: not flags[name]})
        with pytest.raises(SettingError, match=f"The flag {name} is {not flags[name]}"):
            opened.verify()


@pytest.mark.parametrize("value", [None, "0", "1"])
@needs_compiler_flag
def test_a_compiler_that_is_not_loaded_counts_as_its_variable_says(monkeypatch, value):
    monkeypatch.delitem(sys.modules, torch_flags._INDUCTOR)
    if value is None:
        monkeypatch.delenv(INDUCTOR, raising=False)
    else:
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
    weights = []
    for fill in (False, True):  # a correct program has the same bits either way
        with deterministic(seed=3, fill_uninitialized_memory=fill):
            weights.append(digest(torch.empty(SIZE).uniform_()))
    assert weights[0] == weights[1]


@pytest.fixture
def threads_restored():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def product():
    """Multiply a million numbers in one reduction, cut into a part for each thread."""
    numbers = torch.randn(1_000_003, generator=torch.Generator().manual_seed(0))
    return digest((1 + numbers * 1e-4).prod())


@ALONE
@pytest.mark.usefixtures("threads_restored")
def test_a_product_differs_between_numbers_of_threads_unless_one_is_pinned():
    free, pinned = [], set()
    for number in (1, 2):
        torch.set_num_threads(number)
        free.append(product())
        with deterministic(threads=2):
            pinned.add(product())
        assert torch.get_num_threads() == number
    assert free[0] != free[1]
    assert len(pinned) == 1


@ALONE
@pytest.mark.usefixtures("threads_restored")
def test_a_number_that_somebody_changes_is_found():
    with deterministic(threads=2) as pinned:
        pinned.verify()
        torch.set_num_threads(1)
        with pytest.raises(SettingError, match="1 CPU threads are in use, and 2 were pinned"):
            pinned.verify()
        with deterministic() as free:
            free.verify()


@pytest.mark.parametrize("number", [None, 1])
@pytest.mark.parametrize("value", ["true", "TRUE", "1"])
def test_a_number_that_openmp_varies_is_refused(monkeypatch, number, value):
    """Under load, with two threads pinned, `product` was found to be that of one thread."""
    monkeypatch.setenv("OMP_DYNAMIC", value)
    with (
        pytest.raises(SettingError, match=f"OMP_DYNAMIC is '{value}'.*OMP_DYNAMIC=false"),
        threads_pinned(number),
    ):
        pass
    monkeypatch.setenv("OMP_DYNAMIC", "false")
    with threads_pinned(number):
        pass


@pytest.mark.parametrize(
    ("text", "number"), [("3", 3), ("", None), ("0", None), (" 2,1", 2), ("many", None)]
)
def test_the_number_of_the_user_is_that_at_the_start(monkeypatch, text, number):
    monkeypatch.setattr(torch_flags, "_NUMBER_AT_START", text)
    monkeypatch.setenv("OMP_NUM_THREADS", "17")
    assert read_threads() == number
