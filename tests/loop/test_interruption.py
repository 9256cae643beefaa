"""A loop is surveyed, killed at a point, and resumed, as ``d9m repeat --interrupt`` does it."""

import json
import signal
from pathlib import Path

import pytest
import torch
from torch import nn
from trainings import make_loader

from lightning_d9m import Recorder, SettingError, compare, deterministic
from lightning_d9m.cli.main import main
from lightning_d9m.launch import interruption_points
from lightning_d9m.loop import interruption

EXAMPLE = Path(__file__).parents[2] / "examples" / "plain_torch.py"


class KilledError(BaseException):
    """Ends the training in place of SIGKILL."""


@pytest.fixture
def train(monkeypatch, tmp_path):
    """Return a function that trains under variables, as in a process of its own."""

    def kill(pid, number):
        assert (pid, number) == (interruption.os.getpid(), signal.SIGKILL)
        raise KilledError

    monkeypatch.setattr(interruption.os, "kill", kill)
    monkeypatch.setenv("LIGHTNING_D9M_CHECKPOINT_DIR", str(tmp_path / "points"))
    (tmp_path / "points").mkdir()

    def run(*, interrupt="", resume="", first=None, loaders=1, accumulated=1):
        monkeypatch.setattr(interruption_points._FaultState, "fits", 0)
        monkeypatch.setenv("LIGHTNING_D9M_INTERRUPT", interrupt)
        monkeypatch.setenv("LIGHTNING_D9M_RESUME", str(resume))
        with deterministic(seed=3, threads=1):
            model = nn.Sequential(nn.Linear(64, 16), nn.Dropout(0.3), nn.Linear(16, 10))
            optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
            loader = make_loader()
            with Recorder(tmp_path / "runs", model, optimizer, scheduler) as run:
                for epoch in range(run.next_epoch if first is None else first, 3):
                    for _ in range(loaders):
                        for number, (images, classes) in enumerate(run.batches(loader), 1):
                            loss = nn.functional.cross_entropy(model(images), classes)
                            loss.backward()
                            if number % accumulated == 0:
                                optimizer.step()
                                optimizer.zero_grad()
                                run.step(loss=loss)
                                scheduler.step()  # after the recorder has counted the step
                    run.epoch(epoch)
        return run

    return run


@pytest.mark.parametrize(
    ("point", "step"), [("epoch:0", 6), ("batch:1:2", 8), ("batch:1:6", 12), ("batch:0:4+3", 4)]
)
def test_a_loop_killed_at_a_point_ends_at_the_same_bits(train, tmp_path, point, step):
    straight = train(interrupt="survey")
    shapes = json.loads((tmp_path / "points/survey").read_text())
    assert [(shape["batches"], shape["unit"]) for shape in shapes] == [(6, "step")] * 3
    with pytest.raises(KilledError):
        train(interrupt=point)
    assert (tmp_path / "points/killed").read_text() == point
    resumed = train(resume=tmp_path / "points/interrupted.ckpt")
    comparison = compare(straight.ledger, resumed.ledger)
    assert comparison.verdict == "equal"
    assert [entry.step for entry in comparison.ranks[0].actual_breaks] == [step]


def test_a_checkpoint_that_lost_the_momentum_differs(train, tmp_path):
    """The comparison of resumed runs can fail."""
    straight = train()
    with pytest.raises(KilledError):
        train(interrupt="batch:1:2")
    path = tmp_path / "points/interrupted.ckpt"
    saved = torch.load(path, weights_only=True)
    saved["optimizer 0"]["state"][0]["exp_avg"].zero_()
    torch.save(saved, path)
    assert compare(straight.ledger, train(resume=path).ledger).verdict == "different"


def test_steps_are_counted_where_batches_are_accumulated(train, tmp_path):
    straight = train(interrupt="survey", accumulated=2)
    assert json.loads((tmp_path / "points/survey").read_text())[0]["batches"] == 3
    with pytest.raises(KilledError):
        train(interrupt="batch:1:2", accumulated=2)
    resumed = train(resume=tmp_path / "points/interrupted.ckpt", accumulated=2)
    comparison = compare(straight.ledger, resumed.ledger)
    assert (comparison.verdict, comparison.ranks[0].actual_breaks[0].batch) == ("equal", 4)


def test_an_epoch_of_two_loaders_is_interrupted_at_its_end_only(train, tmp_path):
    straight = train(interrupt="survey", loaders=2)
    shapes = json.loads((tmp_path / "points/survey").read_text())
    assert [shape["batches"] for shape in shapes] == [1, 1, 1]
    with pytest.raises(KilledError):
        train(interrupt="epoch:0", loaders=2)
    resumed = train(resume=tmp_path / "points/interrupted.ckpt", loaders=2)
    assert compare(straight.ledger, resumed.ledger).verdict == "equal"


def test_a_loop_that_begins_at_epoch_0_again_is_told(train, tmp_path):
    with pytest.raises(KilledError):
        train(interrupt="epoch:0")
    with pytest.raises(SettingError, match=r"in a run that resumes, from run\.next_epoch"):
        train(resume=tmp_path / "points/interrupted.ckpt", first=0)


def test_the_command_interrupts_a_loop(tmp_path, monkeypatch, capsys, forking_python):
    """Real processes, of which two are killed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    words = [forking_python, str(EXAMPLE), "--epochs", "2"]
    assert main(["repeat", "--interrupt", "--", *words]) == 0
    out = capsys.readouterr().out
    assert out.startswith("equal: 3 runs agree bit for bit")
    assert "run 3: saved after step 14 of 29 of epoch 1, killed there, resumed" in out
