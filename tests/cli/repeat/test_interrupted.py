"""``d9m repeat --interrupt``: runs that are killed and resumed are compared with a straight one."""

import json
import os
import re
import subprocess
import sys
from datetime import datetime, timezone
from pickle import UnpicklingError
from types import SimpleNamespace

import pytest
import torch

from lightning_d9m import (
    D9mError,
    DeterminismCallback,
    Recorder,
    SettingError,
    deterministic,
)
from lightning_d9m.cli.main import main
from lightning_d9m.cli.repeat import _REMEDIES, _measure_start
from lightning_d9m.control.env_settings import read_settings
from lightning_d9m.errors import InexactResumeError
from lightning_d9m.launch.progress import RunProgress
from lightning_d9m.launch.run import Run

# A user's project without importing torch: it writes a ledger, and obeys the variables as the
# callback in a project does.
PROJECT = """
import json, os, signal
from pathlib import Path
from lightning_d9m.ledger.format.writer import LedgerWriter
from lightning_d9m.ledger.folder import create_ledger_folder, rank_path
from lightning_d9m.ledger.format.records import Digests, End, Header, RunFacts

request = os.environ.get("LIGHTNING_D9M_INTERRUPT")
resume = os.environ.get("LIGHTNING_D9M_RESUME")
folder = Path(os.environ.get("LIGHTNING_D9M_CHECKPOINT_DIR", ""))

def train(value=7, survey=({survey}), obeys=True):
    ledgers = create_ledger_folder(Path(os.environ["LIGHTNING_D9M_LEDGER_DIR"]))
    with LedgerWriter(rank_path(ledgers, 0)) as ledger:
        ledger.write(Header(rank=0, world_size=1, fit=0, seed=1, created="", package="0",
                            settings={{}}, stack={{}}).as_record())
        ledger.write(RunFacts(model="m", parameters=1, train=[]).as_record())
        if request and request != "survey" and obeys:
            (folder / "interrupted.ckpt").write_text(request)
            (folder / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if request == "survey" and survey:
            (folder / "survey").write_text(json.dumps(survey))
        digests = dict(epoch=0, step=0, totals={{"weights": f"{{value:032x}}"}},
                       groups={{"weights": {{"w": f"{{value:032x}}"}}}}, loss=(0.1).hex())
        for moment in ("initial", "epoch", "final"):
            ledger.write(Digests(moment=moment, **digests).as_record())
        ledger.write(End(status="finished").as_record())
"""
LEDGERS = "Path(os.environ['LIGHTNING_D9M_LEDGER_DIR'])"
FORCE = ("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD")
EPOCHS = [{"epoch": n, "batches": 4, "accumulated": 2, "validation": 1} for n in range(2)]
# Two points: the end of epoch 0, and between the accumulated batches of epoch 1.
FEW = [{**epoch, "batches": 2, "validation": 0} for epoch in EPOCHS]


@pytest.fixture
def repeat(tmp_path, monkeypatch, capsys):
    """Return a function that repeats a project with --interrupt; it gives (status, out, errors)."""
    monkeypatch.chdir(tmp_path)

    def run(code, *words, survey=FEW):
        script = tmp_path / "script.py"
        script.write_text(PROJECT.format(survey=survey) + code)
        status = main(["repeat", "--interrupt", *words, "--", sys.executable, str(script)])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def test_parallel_fits_of_a_resumed_run_are_paired_by_content(repeat):
    """Their ledgers took other numbers than in the straight run."""
    status, out, _ = repeat("for value in (8, 5) if resume else (5, 8): train(value)")
    assert (status, out.count(" differs")) == (0, 0)


def table(output):
    """Return the lines of the table, which stands below the verdict."""
    return output.split("\n\n")[1].splitlines()


def test_each_place_gets_a_run_that_is_killed_and_one_that_is_resumed(
    repeat, tmp_path, monkeypatch
):
    expected = {}

    class Progress(RunProgress):
        def __init__(self, title, folder, seconds=None):
            expected[title] = seconds
            super().__init__(title, folder, seconds)

    monkeypatch.setattr("lightning_d9m.launch.run.RunProgress", Progress)
    status, out, err = repeat("train()", survey=EPOCHS)
    assert status == 0
    assert "equal: the fits of 6 runs agree bit for bit" in out
    assert [line.split()[-1] for line in table(out)[1:7]] == ["reference"] + ["equal"] * 5
    assert table(out)[7:13] == [
        "run 1: straight",
        "run 2: killed at the end of epoch 0, resumed",
        "run 3: saved after batch 2 of 4 of epoch 1, killed there, resumed",
        "run 4: killed after batch 3 of epoch 1, between accumulated batches, resumed",
        "run 5: killed in epoch 1's validation, after batch 1 of 1, resumed",
        "run 6: killed at the end of epoch 1's validation, resumed",
    ]
    assert "run 2 of 6, to be killed: started" in err
    assert "run 6 of 6, resumed: done, 1 epoch" in err
    assert max(map(len, [*out.splitlines()[:-1], *err.splitlines()])) <= 80
    assert not list(tmp_path.glob("d9m-runs/000/*/checkpoints"))
    # From run 2 on, the progress line says how long each takes: its share of the straight run.
    assert expected["run 1, straight"] is None
    assert expected["run 2 of 6, to be killed"] == expected["run 2 of 6, resumed"] > 0
    assert expected["run 3 of 6, to be killed"] == 3 * expected["run 3 of 6, resumed"] > 0


@pytest.mark.parametrize(
    ("created", "seconds"),
    [("2026-01-01T00:00:04+00:00", 4.0), ("2025-12-31T23:59:59+00:00", 0.0), ("", 0.0)],
)
def test_a_run_starts_until_its_first_fit_begins(created, seconds):
    ledger = SimpleNamespace(header=SimpleNamespace(created=created))
    began = datetime(2026, 1, 1, tzinfo=timezone.utc).timestamp()
    assert _measure_start(Run({"fit-000": ledger}), began) == seconds


def test_a_resumed_run_that_differs_is_named_and_its_checkpoint_kept(repeat, tmp_path):
    code = "train(8 if resume and Path(resume).read_text() == 'validation:1:1' else 7)"
    status, out, _ = repeat(code, survey=EPOCHS)
    assert status == 1
    assert [line.split()[-1] for line in table(out)[1:7]].index("differs") == 4
    assert out.startswith("different: 1 of 6 runs differs from run 1. Run 5: ")
    assert "the checkpoint lacks state that the training uses" in " ".join(out.split())
    assert "d9m locate" not in out  # straight runs agree
    (kept,) = tmp_path.glob("d9m-runs/000/*/checkpoints/interrupted.ckpt")
    assert kept.read_text() == "validation:1:1"


def test_json_says_what_was_done(repeat):
    status, out, _ = repeat("train()", "--json", survey=EPOCHS[:1])
    result = json.loads(out)
    assert status == 0
    assert result["verdict"] == "equal"
    assert result["runs"][0]["label"] == "straight"
    assert result["runs"][2]["label"].startswith("killed after batch 3 of epoch 0")


def test_later_fits_are_compared_too(repeat):
    status, out, _ = repeat("train(); train(8 if resume else 7)", survey=EPOCHS[:1])
    assert status == 1
    assert "from run 1. Run 2, fit 2: " in out


@pytest.mark.parametrize(
    ("code", "survey", "message"),
    [
        ("train(survey=None)", [], "did not report where it can be interrupted"),
        ("train()", [{**EPOCHS[0], "batches": 1, "validation": 0}], "no point at which it can be"),
        ("train()", [{"epoch": 1}], "survey cannot be read"),
        ("assert not request, 'too early'; train()", EPOCHS, "| AssertionError: too early"),
    ],
)
def test_a_command_that_cannot_be_tested_is_one_clear_error(repeat, code, survey, message):
    status, out, err = repeat(code, survey=survey)
    assert status == 2
    assert not out
    assert err.count("d9m: error:") == 1
    assert message in err


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("train(obeys=False)", "without reaching the point"),
        ("assert not resume, 'no way'; train()", "| AssertionError: no way"),
        ("if not resume: train()", "wrote no ledger"),
        ("if not request or request == 'survey': train()", "without reaching the point"),
        ("assert request == 'survey', 'too early'; train()", "| AssertionError: too early"),
        ("train(); 0 if not resume else next(ledgers.glob('*/*')).write_text('{')", "not a ledger"),
    ],
)
def test_points_that_fail_are_all_reported(repeat, code, message):
    status, out, err = repeat(code.replace("ledgers", LEDGERS))
    assert status == 2
    assert "d9m: error:" not in err
    assert [line for line in out.splitlines() if line.startswith("run 2: ")] == [
        "run 2: killed at the end of epoch 0, failed"
    ]
    assert [line.split()[1] for line in out.splitlines() if line.startswith("Run ")] == [*"23"]
    assert out.count(message) == 2
    assert out.startswith("incomplete: 2 runs failed.\n\n")


FAIL_ONCE = "assert not (resume and 'epoch:0' == Path(resume).read_text()), {cause!r}\n"


def test_a_point_that_fails_leaves_the_verdicts_of_the_others(repeat):
    status, out, _ = repeat(FAIL_ONCE.format(cause="why") + "train()")
    assert status == 2
    assert [line.split()[0] for line in table(out)[1:3]] == [*"13"]
    assert [line.split()[-1] for line in table(out)[1:3]] == ["reference", "equal"]
    assert "\nrun 2: killed at the end of epoch 0, failed\n" in out
    assert "| AssertionError: why" in out
    assert "incomplete: 1 run failed; the fits of 2 runs agree bit for bit" in out


def test_a_difference_outweighs_a_failure(repeat):
    status, out, _ = repeat(FAIL_ONCE.format(cause="why") + "train(8 if resume else 7)", "--json")
    result = json.loads(out)
    assert (status, result["verdict"]) == (1, "different")
    assert [entry["run"] for entry in result["failed"]] == [2]
    assert "AssertionError: why" in result["failed"][0]["error"]
    assert [entry["run"] for entry in result["differing"]] == [3]
    out = repeat(FAIL_ONCE.format(cause="why") + "train(8 if resume else 7)")[1]
    assert out.startswith("different: 1 of 2 runs differs from run 1; 1 run failed. Run 3: ")


@pytest.mark.parametrize(
    ("cause", "remedy"),
    [
        ("InexactResumeError: no", "set LIGHTNING_D9M_ON_INEXACT_RESUME=warn before the command"),
        ("Weights only load failed.", "add --allow-objects, or call fit(..., weights_only=False)"),
        ("something else", None),
    ],
)
def test_the_remedy_is_named(repeat, cause, remedy):
    out = repeat(FAIL_ONCE.format(cause=cause) + "train()")[1]
    assert cause in out
    if remedy is None:
        assert "--allow-objects" not in out
        assert "ON_INEXACT_RESUME" not in out
    else:
        assert out.count(remedy) == 1


def test_the_remedies_are_found_by_words_of_the_real_errors(tmp_path):
    path = tmp_path / "object.ckpt"
    torch.save({"loop": D9mError()}, path)
    with pytest.raises(UnpicklingError) as caught:
        torch.load(path)
    inexact, objects, epochs = _REMEDIES
    assert objects in str(caught.value)
    with deterministic(seed=1), Recorder(tmp_path, torch.nn.Linear(1, 1)) as run:
        run.begin()
        with pytest.raises(SettingError, match=re.escape(epochs)):
            run.epoch(1)
    assert inexact == InexactResumeError.__name__
    (name, value) = re.search(r"(LIGHTNING_D9M\w+)=(\w+)", _REMEDIES[inexact]).groups()
    assert read_settings(DeterminismCallback, {name: value}) == {"on_inexact_resume": "warn"}


@pytest.mark.parametrize("options", [(), ("--allow-objects",)])
def test_objects_are_allowed_in_resumed_runs_only(repeat, tmp_path, monkeypatch, options):
    monkeypatch.setenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "1")
    repeat("print(*map(os.environ.get, FORCE)); train()".replace("FORCE", repr(FORCE)), *options)
    logs = {path.parent.name: path.read_text() for path in tmp_path.rglob("output.log")}
    assert len(logs) == 5
    for name, text in logs.items():
        resumed = name != "run-001" and "killed" not in name
        assert text == ("0 1\n" if options and resumed else "1 None\n")


def test_runs_beside_interrupt_are_misuse(repeat):
    status, _, err = repeat("train()", "-n", "3")
    assert status == 2
    assert "--runs is 3, but --interrupt makes one run for each point" in err


def test_a_command_that_outlives_its_kill_is_killed(repeat):
    code = "os.kill = lambda *_: signal.pause()\ntrain()"
    assert repeat(code, survey=EPOCHS[:1])[0] == 0


def test_own_variables_of_an_earlier_run_do_not_reach_the_command(repeat, monkeypatch):
    monkeypatch.setenv("LIGHTNING_D9M_RESUME", "/no/such/checkpoint")
    assert repeat("train()", survey=EPOCHS[:1])[0] == 0


# A real project that does not mention lightning_d9m. With `hidden`, its training draws from an
# iterator, which no checkpoint can hold, and which does not show that it changes.
TRAINING = """
import lightning.pytorch as L
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

HIDDEN = iter(np.random.default_rng(0).random, None)

class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 1))

    def training_step(self, batch, _):
        noise = next(HIDDEN) if {hidden} else torch.rand(())
        return (self.layers(batch[0]) + float(noise)).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)

if __name__ == "__main__":
    data = TensorDataset(torch.linspace(0, 1, 256).reshape(32, 8))
    quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False,
                 enable_model_summary=False, accelerator="cpu", num_sanity_val_steps=0)
    trainer = L.Trainer(max_epochs=1, accumulate_grad_batches=2, **quiet)
    trainer.fit(Net(), DataLoader(data, 4, shuffle=True))
"""


@pytest.mark.parametrize(("hidden", "verdict"), [(False, "equal"), (True, "different")])
def test_a_real_project_is_tested_unchanged(tmp_path, forking_python, hidden, verdict):
    """All of its state is restored; an iterator that cannot be restored makes runs differ."""
    script = tmp_path / "train.py"
    script.write_text(TRAINING.format(hidden=hidden))
    d9m = (forking_python, "-m", "lightning_d9m")
    done = subprocess.run(
        [*d9m, "repeat", "--interrupt", "--json", "--", forking_python, str(script)],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    result = json.loads(done.stdout or "{}")
    assert result.get("verdict") == verdict, done.stderr
    assert done.returncode == (verdict != "equal")
    assert len(result["ledgers"]) == 3
    assert [entry["run"] for entry in result["differing"]] == ([2, 3] if hidden else [])
