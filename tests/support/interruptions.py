"""Loops that are killed at a point and resumed, in this process."""

import json
import shutil
import signal

import pytest

from lightning_d9m import compare
from lightning_d9m.engine.recording import interruption_points


class KilledError(BaseException):
    """Ends the training in place of SIGKILL."""


@pytest.fixture
def begin_run(monkeypatch, tmp_path):
    """Return a function that sets the variables of a run, as in a process of its own."""

    def kill(pid, number):
        assert (pid, number) == (interruption_points.os.getpid(), signal.SIGKILL)
        raise KilledError

    monkeypatch.setattr(interruption_points.os, "kill", kill)
    monkeypatch.setenv("LIGHTNING_D9M_CHECKPOINT_DIR", str(tmp_path / "points"))
    (tmp_path / "points").mkdir()

    def begin(interrupt, resume):
        monkeypatch.setattr(interruption_points._FaultState, "fits", 0)
        monkeypatch.setenv("LIGHTNING_D9M_INTERRUPT", interrupt)
        monkeypatch.setenv("LIGHTNING_D9M_RESUME", str(resume))

    return begin


def interrupt(train, folder, *points, **arguments):
    """Survey a training, kill it at each point and resume it; return epochs and interruptions.

    Args:
        train: Trains with ``interrupt`` or ``resume``, and returns the recorder.
        folder: Holds ``points``, the folder of ``begin_run``.
        points: The points.
        arguments: Further arguments of ``train``.

    Returns:
        (batches, unit) of each epoch, and where the run of each point was interrupted.
    """
    straight = train(interrupt="survey", **arguments)
    epochs = json.loads((folder / "points/survey").read_text())
    breaks = []
    for point in points:
        with pytest.raises(KilledError):
            train(interrupt=point, **arguments)
        assert (folder / "points/killed").read_text() == point
        resumed = train(resume=folder / "points/interrupted.ckpt", **arguments)
        comparison = compare(straight.ledger, resumed.ledger)
        assert comparison.verdict == "equal", point
        breaks += comparison.ranks[0].actual.breaks
        shutil.rmtree(folder / "points")
        (folder / "points").mkdir()
    return [(epoch["batches"], epoch["unit"]) for epoch in epochs], breaks
