"""A session switches everything, restores everything, and nests."""

import os
import random
from contextlib import contextmanager

import numpy as np
import pytest
import torch

import lightning_d9m
from lightning_d9m import SettingError, Settings
from lightning_d9m.control import session
from lightning_d9m.control.algorithms import capture_flags
from lightning_d9m.control.session import active_session, deterministic, enable, next_fit
from lightning_d9m.control.variables import CUBLAS
from lightning_d9m.patches.registration import patches_applied


def state():
    """Return everything that a session may change."""
    return (
        capture_flags(),
        dict(os.environ),
        torch.get_num_threads(),
        torch.get_rng_state().tolist(),
        random.getstate(),
        np.random.get_state()[1].tolist(),
    )


def test_everything_is_switched_and_restored():
    before = state()
    with deterministic(seed=3, threads=1, fill_uninitialized_memory=False) as opened:
        assert active_session() is opened
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.utils.deterministic.fill_uninitialized_memory
        assert torch.get_num_threads() == 1
        assert os.environ[CUBLAS] == ":4096:8"
        torch.rand(3), random.random(), np.random.rand()
    assert active_session() is None
    assert state() == before


def test_everything_is_restored_when_the_body_raises():
    before = state()
    with pytest.raises(ZeroDivisionError), deterministic(seed=3, threads=1):
        raise ZeroDivisionError
    assert state() == before


def test_everything_is_restored_when_opening_fails_midway(monkeypatch):
    before = state()

    def fail(seed):
        raise RuntimeError("no generator")

    monkeypatch.setattr(session, "seed_all", fail)
    with pytest.raises(RuntimeError, match="no generator"):
        enable(threads=1)
    assert state() == before
    assert active_session() is None


def test_enable_seeds_as_torch_does():
    with enable(seed=42):
        ours = torch.rand(3)
        torch.manual_seed(42)
        assert torch.equal(torch.rand(3), ours)


def test_enable_lasts_until_close():
    opened = enable(Settings(seed=1))
    try:
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        opened.close()
    opened.close()
    assert not torch.are_deterministic_algorithms_enabled()


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


def test_closing_out_of_order_is_an_error():
    outer = enable(seed=1)
    inner = enable(seed=2)
    with pytest.raises(SettingError, match="reverse order"):
        outer.close()
    inner.close()
    outer.close()


def test_an_unknown_setting_is_named():
    with pytest.raises(SettingError, match="There is no setting sed; the settings are seed, "):
        lightning_d9m.enable(sed=1)


def test_a_switch_that_is_turned_off_is_found():
    with deterministic() as opened:
        opened.verify()
        torch.backends.cudnn.deterministic = False
        with pytest.raises(SettingError, match=r"cudnn\.deterministic is False"):
            opened.verify()


def test_fits_are_counted(monkeypatch):
    monkeypatch.setattr(session, "_fits", 0)
    assert [next_fit(), next_fit()] == [0, 1]


@pytest.fixture
def cuda(monkeypatch):
    """Let patches be applied as on a CUDA machine; return which are, from outside in."""
    applied = []

    @contextmanager
    def record(key, exclude):
        applied.append((key, exclude))
        yield
        applied.pop()

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(session, "patches_applied", record)
    return applied


def test_operations_are_patched_where_there_is_cuda_and_once(cuda):
    with deterministic(), deterministic(patch_ops=True, unpatched_ops=("topk",)):
        assert cuda == [("CUDA", ("topk",))]
        with deterministic(patch_ops=True):
            assert cuda == [("CUDA", ("topk",))]
    assert cuda == []


def test_patches_can_be_registered_for_cuda_without_a_device():
    """The registration itself, which is all of it that a machine without CUDA can show."""
    with patches_applied("CUDA") as applied:
        assert "topk" in applied.names
