"""A search runs the command twice at once, and one after the other if that fails."""

import sys
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
from ledger_program import PROGRAM

from lightning_d9m.errors import CommandError
from lightning_d9m.tools.launch.runs import Runs, make_output
from lightning_d9m.tools.locate import runner as runners
from lightning_d9m.tools.locate.runner import WHOLE, Runner
from lightning_d9m.tools.segments.segment import Segment

# The first run has what the second one needs, until that has failed.
LOCKED = """
lock, tried = Path("lock"), Path("tried")
try:
    lock.touch(exist_ok=False)
except FileExistsError:
    rank_path(create_ledger_folder(ledgers), 0).write_text("no header\\n")
    tried.touch()
    sys.exit("busy")
train()
while not tried.exists():
    time.sleep(0.01)
lock.unlink()
"""


@pytest.fixture
def make(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def runner(program, **words):
        Path("train.py").write_text(PROGRAM + program)
        return Runner(Runs([sys.executable, "train.py"], make_output(None), 60.0), {}, **words)

    return runner


def test_runs_follow_each_other_if_one_fails_beside_the_other(make, capsys):
    runner = make(LOCKED)
    (pair,) = runner.run_pairs(WHOLE, 1)
    assert (pair.differs, len(runner.made)) == (False, 2)
    errors = capsys.readouterr().err
    assert "| busy\na run failed beside the other: one after the other" in errors
    (failed,) = Path("d9m-runs/000").glob("failed-00[12]")
    assert (failed / "output.log").read_text() == "busy\n"
    (said,) = runner.failed
    assert said.endswith(f"Log: {failed.absolute() / 'output.log'}. busy")
    assert sorted(path.name for path in failed.parent.glob("run-*")) == ["run-001", "run-002"]


def test_a_program_that_always_fails_does_not_run_again(make, capsys):
    """What its failures say differs, as by times and process numbers."""
    runner = make("print(os.getpid(), time.time())\nsys.exit('broken')")
    with pytest.raises(CommandError, match=r"\| broken"):
        next(runner.run_pairs(WHOLE, 1))
    said = capsys.readouterr().err
    assert "one after the other" not in said
    assert "both runs failed. If each needs a device, a port or memory alone: --one-by-one" in said


def test_the_first_two_runs_count_as_made(make):
    """Their settings name the ops that may vary."""
    runner = make("train()")
    (pair,) = runner.run_pairs(WHOLE, 1)
    assert [run.fits[pair.fit] for run in runner.made] == [pair.expected, pair.actual]


def test_a_difference_counts_although_one_run_has_begun_a_further_fit(make):
    """Both are killed where they differ, and one may have come further than the other."""
    runner = make("print(request)\ntrain(run)\nif run == 1: train(7)", beside=False)
    (pair,) = runner.run_pairs(WHOLE, 1)
    assert (pair.differs, pair.fit, pair.fits) == (True, "fit-000", 1)
    logs = sorted(Path("d9m-runs").rglob("output.log"))
    assert [log.read_text() for log in logs] == ["keep\n"] * 2  # checkpoints for later looks


def test_a_later_look_may_take_as_long_as_the_first_that_finds_a_difference(make, monkeypatch):
    clock = count(0, 100)  # each time that it is read
    monkeypatch.setattr(runners, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    runner = make("train(run)")
    first = next(runner.run_pairs(WHOLE, 2))
    clock = count(0, 40)
    looks = runner.run_pairs("values", 1, segment=Segment(None, 4))
    assert (first.differs, len(list(looks))) == (True, 3)
