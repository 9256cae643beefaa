"""A run keeps its last three checkpoints, as often as costs a small share of its time."""

from pathlib import Path

import pytest

from lightning_d9m.engine.ranks.ranks import Ranks
from lightning_d9m.engine.recording.checkpoint_ring import CheckpointRing


@pytest.mark.parametrize("make", [Path.touch, Path.mkdir])
@pytest.mark.parametrize(("step_seconds", "save_seconds"), [(0.01, 0.002), (0.3, 0.05), (1.0, 3.0)])
def test_saves_take_two_percent_of_the_time_and_three_stay(
    tmp_path, step_seconds, save_seconds, make
):
    clock = [0.0]
    saved = []

    def save(path):
        clock[0] += save_seconds
        make(path)
        saved.append(path)

    ring = CheckpointRing(tmp_path, Ranks(0), lambda: clock[0])
    for step in range(1, 2001):
        clock[0] += step_seconds
        ring.reach(step, save)
    share = len(saved) * save_seconds / clock[0]
    assert 0.005 < share < 0.0125  # a save counts twice
    assert sorted(tmp_path.iterdir()) == sorted(saved[-3:])


def test_what_cannot_be_saved_does_not_end_the_training(tmp_path):
    """A program whose state cannot be saved need not save itself."""
    clock, calls = [0.0], []

    def save(path):
        calls.append(path)
        raise TypeError("cannot pickle")

    ring = CheckpointRing(tmp_path, Ranks(0), lambda: clock[0])
    for step in range(1, 9):
        clock[0] += 1.0
        ring.reach(step, save)
    assert len(calls) == 1
