"""Requests of variables to save, resume or end a training."""

import os
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_d9m.engine.ranks.ranks import Ranks
from lightning_d9m.engine.recording.checkpoint_ring import CheckpointPoints
from lightning_d9m.engine.recording.interruption import (
    _REQUESTS,
    FOLDER,
    INTERRUPT,
    Interruption,
    InterruptRequest,
    _FaultState,
    is_segment,
    read_request,
)
from lightning_d9m.errors import SettingError

# By kind: a request, the step after which it ends, and whether it needs saved state.
REQUESTS = {
    "keep": ("keep", None, False),
    "points": ("points", None, True),
    "stop": ("stop:320", 320, False),
    "epoch": ("epoch:2", 10**17, False),
    "nonfinite": ("nonfinite:7", 7, True),
    "tape": ("tape:7", 7, True),
    "debug": ("debug:0:pdb:9:logs/a:b", 9, True),
    "debug-anyway": ("debug-anyway:1:pdb:9:x", 9, True),
}


@pytest.fixture
def read(monkeypatch, tmp_path):
    def run(text):
        monkeypatch.setattr(_FaultState, "fits", 0)
        return read_request({INTERRUPT: text, FOLDER: str(tmp_path)})

    return run


def test_the_run_beside_is_that_of_rank_0(read):
    request = read("keep:runs/a:b")
    assert (request.kind, request.stop, str(request.beside)) == ("keep", None, "runs/a:b")
    assert [Interruption(request, Ranks(rank))._pace is None for rank in (0, 1)] == [False, True]


@pytest.mark.parametrize("kind", _REQUESTS)
def test_each_kind_of_request(read, kind):
    text, stop, needs = REQUESTS[kind]
    found = read(text)
    assert (found.kind, found.stop, found.needs_saving) == (kind, stop, needs)
    assert is_segment({INTERRUPT: text}) == (stop is not None)
    assert (found.debugger is not None) == kind.startswith("debug")
    assert read_request({INTERRUPT: text}) == InterruptRequest()  # of the second fit


@pytest.mark.parametrize(
    "text", ["survey", "stop", "stop:-1", "epoch:x", "points:1", "debug:0:gdb:1:x"]
)
def test_invalid_requests_are_named(read, text):
    with pytest.raises(SettingError) as caught:
        read(text)
    assert str(caught.value).startswith(f"The variable LIGHTNING_D9M_INTERRUPT is {text!r}; allow")


@given(st.integers(1, 400))
def test_two_points_of_a_kind_are_kept_of_which_one_is_within_the_fit(tmp_path_factory, count):
    folder = tmp_path_factory.mktemp("points")
    points = CheckpointPoints(folder, Ranks(0))
    for _ in range(count):
        if (path := points.reach("step")) is not None:
            path.touch()
    kept = sorted(int(path.stem.partition("-")[2]) for path in folder.iterdir())
    assert len(kept) == min(2, count)
    assert kept[-1] * 8 // 5 + 1 > count
    assert count == 1 or kept[0] < count


def test_a_second_process_with_a_first_fit_is_refused(read, tmp_path):
    """Ranks of one training are several processes, too, of which rank 0 stands for all."""
    for rank in (1, 0, 1):
        Interruption(read("stop:320"), Ranks(rank))
    assert not (tmp_path / "several").exists()
    with pytest.raises(SettingError, match="Two processes of the command begin a first fit"):
        Interruption(read("stop:320"), Ranks(0))
    assert (tmp_path / "several").exists()


def test_a_segment_that_ends_with_its_fit_was_not_stopped(read, monkeypatch):
    """Else a fit that is over before the step of `d9m goto` would pass for one that reached it."""
    monkeypatch.setattr(Interruption, "_end", lambda *_: None)
    ends = []
    segment = Interruption(read("stop:9"), Ranks(0), before_stop=ends.append)
    segment.pass_step(8, None)
    segment.stop()
    segment.pass_step(9, None)
    assert [(end.status, end.reason) for end in ends] == [
        ("finished", None),
        ("stopped", "the segment ends after step 9, its batch begins with step 0"),
    ]


LEAVE = """
from lightning_d9m.engine.ranks.ranks import Ranks
from lightning_d9m.engine.recording import interruption
print("said")
request = interruption.InterruptRequest(folder=interruption.Path())
interruption.Interruption(request, Ranks(0)).leave()
"""


def test_what_the_program_has_printed_is_written_before_it_is_killed(tmp_path, forking_python):
    variables = {name: own for name, own in os.environ.items() if name != "PYTHONUNBUFFERED"}
    words = {"cwd": tmp_path, "env": variables, "stdout": subprocess.PIPE}
    done = subprocess.run([forking_python, "-c", LEAVE], check=False, **words)
    assert (done.returncode, done.stdout) == (-9, b"said\n")
