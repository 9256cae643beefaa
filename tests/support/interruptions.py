"""Trainings that save at points and are resumed there, in this process."""

import signal
from pathlib import Path

import pytest

from lightning_d9m import compare
from lightning_d9m.engine.ledger.folder import read_ledger
from lightning_d9m.engine.ledger.format.reader import RankReader
from lightning_d9m.engine.ledger.format.records import Checkpoint
from lightning_d9m.engine.recording import interruption


class KilledError(BaseException):
    """Ends the training in place of SIGKILL."""


@pytest.fixture
def begin_run(monkeypatch, tmp_path):
    """Return a function that sets the variables of a run, as in a process of its own."""

    def kill(pid, number):
        assert (pid, number) == (interruption.os.getpid(), signal.SIGKILL)
        raise KilledError

    monkeypatch.setattr(interruption.os, "kill", kill)
    monkeypatch.setenv("LIGHTNING_D9M_CHECKPOINT_DIR", str(tmp_path / "points"))
    (tmp_path / "points").mkdir()

    def begin(interrupt, resume):
        monkeypatch.setattr(interruption._FaultState, "fits", 0)
        (tmp_path / "points/begun").unlink(missing_ok=True)
        monkeypatch.setenv("LIGHTNING_D9M_INTERRUPT", interrupt)
        monkeypatch.setenv("LIGHTNING_D9M_RESUME", str(resume))

    return begin


def resume_points(train, folder, *names, **arguments):
    """Save at the points of a training, and resume from some; return where they are.

    Args:
        train: Trains with ``interrupt`` or ``resume``, and returns the recorder.
        folder: Holds ``points``, the folder of ``begin_run``.
        names: The names of the checkpoints to resume from.
        arguments: Further arguments of ``train``.

    Returns:
        (epoch, step, batch) of each checkpoint in the folder, by name.
    """
    straight = train(interrupt="points", **arguments)
    with RankReader(read_ledger(straight.ledger).files[0]) as reader:
        saved = [record for record in reader.read_lines() if isinstance(record, Checkpoint)]
    places = {
        path.stem: (record.epoch, record.step, record.batch)
        for record in saved
        if (path := folder / "points" / Path(record.path).name).exists()
    }
    for name in names:
        resumed = train(resume=folder / f"points/{name}.ckpt", **arguments)
        comparison = compare(straight.ledger, resumed.ledger)
        assert comparison.verdict == "equal", name
        (found,) = comparison.ranks[0].actual.breaks
        assert found.step == places[name][1]
    return places


def end_early(train, folder, request, **arguments):
    """Run a segment to its end; return its ledger."""
    with pytest.raises(KilledError):
        train(interrupt=request, **arguments)
    assert (folder / "points/killed").exists()
    return read_ledger(max((folder / "runs").glob("fit-*")))
