"""A loop is surveyed, killed at a point, and resumed, as ``d9m repeat --interrupt`` does it."""

from pathlib import Path

import pytest
import torch
from interruptions import KilledError, interrupt
from torch import nn
from trainings import make_loader

from lightning_d9m import Recorder, SettingError, compare, deterministic
from lightning_d9m.cli.main import main

EXAMPLE = Path(__file__).parents[2] / "examples" / "plain_torch.py"


@pytest.fixture
def train(begin_run, tmp_path):
    """Return a function that trains under variables, as in a process of its own."""

    def run(*, interrupt="", resume="", first=None, loaders=1, accumulated=1):
        begin_run(interrupt, resume)
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


def test_a_loop_killed_at_a_point_ends_at_the_same_bits(train, tmp_path):
    points = {"epoch:0": 6, "batch:1:2": 8, "batch:1:6": 12, "batch:0:4+3": 4}
    shapes, breaks = interrupt(train, tmp_path, *points)
    assert shapes == [(6, "step")] * 3
    assert [entry.step for entry in breaks] == list(points.values())


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
    shapes, breaks = interrupt(train, tmp_path, "batch:1:2", accumulated=2)
    assert (shapes[0][0], breaks[0].batch) == (3, 4)


def test_an_epoch_of_two_loaders_is_interrupted_at_its_end_only(train, tmp_path):
    shapes, _ = interrupt(train, tmp_path, "epoch:0", loaders=2)
    assert [batches for batches, _ in shapes] == [1, 1, 1]


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
    assert out.startswith("equal: the fits of 3 runs agree bit for bit")
    assert "run 3: saved after step 14 of 29 of epoch 1, killed there, resumed" in out
