"""A session switches everything, restores everything, and nests."""

import os
import random
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch_features import needs_patches

import lightning_d9m
from lightning_d9m import SettingError, Settings
from lightning_d9m.engine.control import seeding, session
from lightning_d9m.engine.control.environment import CUBLAS, capture_flags
from lightning_d9m.engine.control.seed_calls import seed_calls
from lightning_d9m.engine.control.session import (
    Session,
    active_session,
    capture_session,
    deterministic,
    enable,
    next_fit,
    note_seeds,
    restart_fits,
    session_inherited,
    set_fits,
)
from lightning_d9m.ops.patches import registration

OTHER = torch.get_num_threads() + 1  # a number of threads that shows whether it was put back


def state():
    return (
        capture_flags(),
        dict(os.environ),
        torch.get_num_threads(),
        torch.get_rng_state().tolist(),
        random.getstate(),
        np.random.get_state()[1].tolist(),
    )


def test_everything_is_switched_and_restored_also_when_the_body_raises():
    before = state()
    words = {"seed": 3, "threads": OTHER, "fill_uninitialized_memory": False}
    with pytest.raises(ZeroDivisionError), deterministic(**words) as opened:
        assert active_session() is opened
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.utils.deterministic.fill_uninitialized_memory
        assert torch.get_num_threads() == OTHER
        assert os.environ[CUBLAS] == ":4096:8"
        torch.rand(3), random.random(), np.random.rand()
        raise ZeroDivisionError
    assert active_session() is None
    assert state() == before


def test_everything_is_restored_when_opening_fails_midway(monkeypatch):
    before = state()

    def fail(seed):
        raise RuntimeError("no generator")

    monkeypatch.setattr(session, "seed_all", fail)
    with pytest.raises(RuntimeError, match="no generator"):
        enable(threads=OTHER)
    assert state() == before
    assert active_session() is None


def test_sessions_nest():
    with deterministic(seed=1, fill_uninitialized_memory=False) as outer:
        first = torch.rand(2)
        with deterministic(seed=2) as inner:
            assert active_session() is inner
            assert torch.utils.deterministic.fill_uninitialized_memory
            torch.rand(5)
        assert active_session() is outer
        assert not torch.utils.deterministic.fill_uninitialized_memory
        second = torch.rand(2)
    with deterministic(seed=1):
        assert torch.equal(torch.rand(2), first)
        assert torch.equal(torch.rand(2), second)


def test_blocks_may_end_in_another_order_than_they_began():
    """As that of a generator, which ends when the generator is closed."""
    before = state()
    first, second, third = (deterministic(seed=seed) for seed in range(3))
    for block in (first, second, third):
        block.__enter__()
    for block in (first, second):
        with pytest.raises(SettingError, match="reverse order"):
            block.__exit__(None, None, None)
    third.__exit__(None, None, None)
    assert (active_session(), state()) == (None, before)


def test_a_block_of_a_closed_session_is_refused():
    session = enable(seed=1)
    with session:
        pass
    with pytest.raises(SettingError, match="This session is closed"), session:
        pass


@pytest.mark.parametrize("seed", [1, 2])
def test_a_second_enable_takes_the_place_of_the_first(seed):
    """As when a cell of a notebook is run again, after something else switched a flag too."""
    before = state()
    first = enable(seed=1, threads=OTHER)
    torch.rand(3)
    torch.backends.cudnn.deterministic = False
    second = enable(seed=seed)
    second.verify()
    assert torch.get_num_threads() == before[2]
    drawn = torch.rand(3)
    torch.manual_seed(seed)
    assert torch.equal(torch.rand(3), drawn)
    first.close()
    assert active_session() is second
    second.close()
    assert active_session() is None
    assert state() == before


def test_a_second_thread_is_refused_while_a_session_is_open():
    """Eight threads that opened sessions side by side used to leave flags switched."""
    before = state()
    start, refusal = threading.Barrier(8), threading.Event()

    def open_session(seed):
        start.wait()
        try:
            with deterministic(seed=seed, threads=OTHER):
                assert refusal.wait(60)
                return ""
        except SettingError as error:
            refusal.set()
            return str(error)

    with ThreadPoolExecutor(8, thread_name_prefix="worker") as pool:
        results = sorted(pool.map(open_session, range(8)))
    assert results[0] == ""
    assert results[-1].startswith("A deterministic session or run is open in thread 'worker_")
    assert active_session() is None
    assert state() == before


def test_a_session_that_waits_for_a_later_one_can_be_entered_again():
    before = state()
    with pytest.raises(SettingError, match="opened later is still open"), deterministic() as outer:
        inner = deterministic(seed=2)
        inner.__enter__()
    with outer:
        inner.__exit__(None, None, None)
        assert active_session() is outer
    assert state() == before


def test_no_other_thread_opens_a_session_while_a_block_ends(monkeypatch):
    """Its session was closed, too, and with it the first one once more."""
    close, may_open = Session.close, []

    def try_to_open():
        if found := session._lock.acquire(blocking=False):
            session._lock.release()
        return found

    def close_late(ending):
        with ThreadPoolExecutor(1) as pool:
            may_open.append(pool.submit(try_to_open).result())
        close(ending)

    monkeypatch.setattr(Session, "close", close_late)
    with deterministic(seed=1):
        pass
    assert may_open == [False]


def test_a_thread_may_open_a_session_after_enable_and_after_another_thread():
    """``enable`` at the top of a program, and one training at a time in threads."""
    outer = enable(seed=1)
    left_open = []
    for _ in range(2):
        worker = threading.Thread(target=lambda: left_open.append(Session(Settings()).__enter__()))
        worker.start()
        worker.join()  # its session outlives it
    assert active_session() is left_open[1]
    with deterministic(seed=2):
        pass
    for inner in reversed(left_open):
        inner.close()
    outer.close()


def test_a_session_that_is_enabled_in_a_block_ends_with_it():
    before = state()
    with deterministic(seed=1):
        enable(seed=2, threads=OTHER)
    assert (active_session(), state()) == (None, before)


def test_an_unknown_setting_is_named():
    with pytest.raises(SettingError, match="There is no setting sed; the settings are seed, "):
        lightning_d9m.enable(sed=1)
    with pytest.raises(SettingError, match=r"settings is 1; allowed: .* enable\(seed=42\)"):
        lightning_d9m.enable(1)


def test_a_second_thread_is_refused_although_enable_opened_the_innermost_session():
    """A fit of the second thread is not counted either."""
    with deterministic(seed=1) as outer, ThreadPoolExecutor(1) as pool:
        inner = enable(seed=2)
        for call in (enable, next_fit):
            with pytest.raises(SettingError, match="is open in thread 'MainThread', so thread"):
                pool.submit(call).result()
        assert (outer.fits.next, inner.fits.next) == (0, 0)


def test_a_new_process_takes_over_session_and_fits(monkeypatch):
    monkeypatch.setattr(session, "_of_process", session.FitCount(5))
    outside = capture_session()
    with deterministic(seed=1) as opened:
        opened.seed_is_default = True
        next_fit()
        within = capture_session()
        with session_inherited(outside):
            assert active_session() is opened  # one that is open stays
            assert next_fit() == 5
    monkeypatch.setattr(session, "_of_process", session.FitCount())
    with session_inherited(within):
        assert capture_session() == within
        assert next_fit() == 1
    assert active_session() is None
    with session_inherited(outside):
        assert active_session() is None
        assert next_fit() == 5
    set_fits(8)
    assert next_fit() == 8


@needs_patches
def test_operations_are_patched_where_there_is_cuda_and_once(monkeypatch):
    cuda = []  # what is applied, from outside in

    @contextmanager
    def record(key, exclude):
        cuda.append((key, exclude))
        yield
        cuda.pop()

    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(registration, "patches_applied", record)
    with deterministic(patch_ops=False), deterministic(unpatched_ops=("histc",), patch_ops=True):
        assert cuda == [("CUDA", ("histc",))]
        with deterministic(patch_ops=True, unpatched_ops=("histc",)):
            assert cuda == [("CUDA", ("histc",))]
        before = state()
        with pytest.raises(
            SettingError, match=r"unpatched_ops is \[\], but an outer .* \['histc'\]"
        ):
            enable(patch_ops=True)
        assert state() == before
    assert cuda == []


@needs_patches  # older torch is asked for devices, to warn: by NVML, which starts no driver
def test_nothing_starts_a_driver(monkeypatch):
    """A launcher that forks after `enable` needs it so; torch is one that was built for CUDA."""

    def fail(*words):
        raise AssertionError("a device was asked for")

    for name in ("is_available", "device_count", "_lazy_init"):
        monkeypatch.setattr(torch.cuda, name, fail)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    accelerator = torch.device("cuda")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: accelerator)
    seeds = []
    monkeypatch.setattr(seeding, "_manual_seed", seeds.append)
    with deterministic(seed=7, patch_ops=True) as opened:
        opened.verify()
        assert seeds == [7]  # every device's, lazily


def test_fits_after_one_seed_have_one_number_and_calls_that_seed_are_noted():
    """A sweep that seeds each fit with one number repeats it, as without this package."""
    original = torch.random.manual_seed  # torch._dynamo wraps the other when it is imported
    for repeats, expected in ((True, [0, 1, 0, 2, 3, 0]), (False, [0, 1, 2, 3, 4, 5])):
        with deterministic(seed=1, repeat_fits=repeats):
            numbers = []
            for seed, fits in ((7, 2), (7, 1), (8, 2), (7, 1)):
                torch.manual_seed(seed)
                numbers += [next_fit() for _ in range(fits)]
            assert numbers == expected
            assert f"manual_seed(7) at {__file__}:" in seed_calls.found[-1]
    assert torch.random.manual_seed is original


def test_a_program_that_seeds_often_keeps_the_last_seeds():
    with deterministic(seed=1) as opened:
        for seed in (*range(1000), 0, 1000):
            torch.manual_seed(seed)
            next_fit()
        assert len(opened.fits.first) == 1000
        assert opened.fits.first[0] == 0
        assert 1 not in opened.fits.first


def test_fits_that_were_forgotten_do_not_number_later_ones():
    note_seeds()
    for _ in range(2):
        torch.manual_seed(7)
        restart_fits()
        assert next_fit() == 0
        torch.manual_seed(7)
        assert next_fit() == 0


COMPILED = """
import torch
from torch import manual_seed as seed_by_name
from lightning_d9m import deterministic
from lightning_d9m.engine.control.seed_calls import seed_calls

def draw(x):
    torch.manual_seed(5)
    return x + torch.rand(2)

expected = draw(torch.zeros(2))
with deterministic(seed=1):
    for way in (draw, torch.jit.script(draw), torch.compile(draw, backend="eager")):
        assert torch.equal(way(torch.zeros(2)), expected), way
    assert len(seed_calls.found) == 2, seed_calls.found
    for seed, function in ((8, torch.random.manual_seed), (9, seed_by_name)):
        function(seed)
        assert f"manual_seed({seed}) at" in seed_calls.found[-1]
    assert f"seed({torch.seed()}) at" in seed_calls.found[-1]
seed_by_name(7)
assert not seed_calls.found
"""


def test_compilers_take_functions_that_seed(tmp_path):
    """Torch's own function is a builtin for one, and not traced by the other."""
    program = tmp_path / "program.py"
    program.write_text(COMPILED)
    subprocess.run([sys.executable, program], check=True)
