"""``d9m repeat --interrupt``: runs that are killed and resumed, held against a straight one."""

import json
import os
import subprocess
import sys

import pytest

from lightning_d9m.cli.main import main

D9M = (sys.executable, "-m", "lightning_d9m")

# Stands for a user's project without the seconds that torch takes to load: it leaves a ledger, and
# obeys the variables as the callback in a project does. A place is where `VALUE` is 1.
PROJECT = """
import json, os, signal
from pathlib import Path
from lightning_d9m.ledger.writer import LedgerWriter
from lightning_d9m.ledger.folder import create_ledger_folder, rank_path
from lightning_d9m.ledger.records import Digests, End, Header, RunFacts

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
EPOCHS = [{"epoch": n, "batches": 4, "accumulated": 2, "validation": 1} for n in range(2)]


@pytest.fixture
def repeat(tmp_path, monkeypatch, capsys):
    """Return a function that repeats a project with --interrupt; it gives (status, out, errors)."""
    monkeypatch.chdir(tmp_path)

    def run(code, *words, survey=EPOCHS):
        script = tmp_path / "script.py"
        script.write_text(PROJECT.format(survey=survey) + code)
        status = main(["repeat", "--interrupt", *words, "--", sys.executable, str(script)])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def test_each_place_gets_a_run_that_is_killed_and_one_that_is_resumed(repeat, tmp_path):
    status, out, err = repeat("train()")
    assert status == 0
    assert "equal: 6 runs agree bit for bit" in out
    assert [line.split()[-1] for line in out.splitlines()[1:7]] == ["expected"] + ["equal"] * 5
    assert out.splitlines()[7:13] == [
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


def test_a_resumed_run_that_differs_is_named_and_its_checkpoint_kept(repeat, tmp_path):
    code = "train(8 if resume and Path(resume).read_text() == 'validation:1:1' else 7)"
    status, out, _ = repeat(code)
    assert status == 1
    assert [line.split()[-1] for line in out.splitlines()[1:7]].index("differs") == 4
    assert "different: 1 of 6 runs differs from run 1; above: run 5." in out
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
    assert "above: run 2, fit 2." in out


@pytest.mark.parametrize(
    ("code", "survey", "message"),
    [
        ("train(survey=None)", [], "did not say where it can be interrupted"),
        ("train()", [{**EPOCHS[0], "batches": 1, "validation": 0}], "no place to be interrupted"),
        ("train()", [{"epoch": 1}], "survey cannot be read"),
        ("train(obeys=False)", EPOCHS, "without passing the place"),
        ("assert not resume, 'no way'; train()", EPOCHS, "| AssertionError: no way"),
        ("if not resume: train()", EPOCHS, "resumed: The command"),
        ("if not request or request == 'survey': train()", EPOCHS, "without passing the place"),
        ("assert request == 'survey', 'too early'; train()", EPOCHS, "| AssertionError: too early"),
    ],
)
def test_a_command_that_cannot_be_tested_is_one_clear_error(repeat, code, survey, message):
    status, out, err = repeat(code, survey=survey)
    assert status == 2
    assert not out
    assert err.count("d9m: error:") == 1
    assert message in err


def test_runs_beside_interrupt_are_misuse(repeat):
    status, _, err = repeat("train()", "-n", "3")
    assert status == 2
    assert "--runs is 3 beside --interrupt" in err


def test_a_command_that_outlives_its_kill_is_killed(repeat):
    code = "os.kill = lambda *_: signal.pause()\ntrain()"
    assert repeat(code, survey=EPOCHS[:1])[0] == 0


def test_own_variables_of_an_earlier_run_do_not_reach_the_command(repeat, monkeypatch):
    monkeypatch.setenv("LIGHTNING_D9M_RESUME", "/no/such/checkpoint")
    assert repeat("train()", survey=EPOCHS[:1])[0] == 0


# A real project that says nothing of lightning_d9m. Its training draws from a generator that
# belongs to nobody: no checkpoint can hold it.
TRAINING = """
import lightning.pytorch as L
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

HIDDEN = np.random.default_rng(0)

class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 1))

    def training_step(self, batch, _):
        noise = HIDDEN.random() if {hidden} else torch.rand(())
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
def test_a_real_project_is_tested_unchanged(tmp_path, hidden, verdict):
    """All of its state is restored; with a generator that nothing can restore, that is found."""
    script = tmp_path / "train.py"
    script.write_text(TRAINING.format(hidden=hidden))
    done = subprocess.run(
        [*D9M, "repeat", "--interrupt", "--json", "--", sys.executable, str(script)],
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
