"""``d9m check``, ``d9m goto`` and ``d9m locate`` on two processes."""

import json
import os
import sys
from pathlib import Path

import pytest
from scripts import ROOT, execute

from lightning_d9m.engine.ledger.folder import read_ledger
from lightning_d9m.engine.ledger.format.reader import read_resume
from lightning_d9m.engine.ledger.format.records import Batch

PROGRAM = str(ROOT / "tests/support/goto_training.py")
HOROVOD = ("-m", "horovod.runner.launch", "-np", "2", "--gloo")


@pytest.mark.parametrize(
    "strategy", ["ddp", "fsdp2", pytest.param("horovod", marks=pytest.mark.horovod)]
)
def test_segments_of_two_processes(strategy, forking_python, d9m, tmp_path, monkeypatch):
    """Both ranks are compared, and a program with another sample is rejected."""
    monkeypatch.chdir(tmp_path)
    variables = {"RANKS": "2", "STRATEGY": strategy, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
    # horovodrun starts its processes by names on PATH.
    variables["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    launcher = (forking_python, *HOROVOD) if strategy == "horovod" else ()
    command = [*launcher, forking_python, PROGRAM, str(tmp_path / "run")]
    execute(*command)
    for words, expected in ((), "equal"), (("label",), "persistent"):
        _, out, errors = d9m("check", "run", "--only", "1", "--json", "--", *command, *words)
        assert out, errors
        (checked,) = json.loads(out)["checked"]
        assert (checked["verdict"], checked["first"]) == (expected, 3), checked
    status, out, errors = d9m("goto", "10", "run", "--trace", "--json", "--", *command)
    assert status == 0, out + errors
    trace = read_ledger(json.loads(out)["trace"])
    steps = {
        rank: {own.step for own in trace.records(rank) if isinstance(own, Batch)} for rank in (0, 1)
    }
    assert steps == {0: {10}, 1: {10}}
    if strategy == "fsdp2":
        locate(d9m, command, tmp_path)


def locate(d9m, command, folder):
    """Find a number that one rank adds in each run; only the steps around it are run again."""
    noisy = [*command[:-1], str(folder / "other"), "noise"]
    execute(*noisy)
    status, out, errors = d9m("locate", "run", "other", "--json", "--", *noisy)
    assert status == 1, errors
    found = json.loads(out)
    assert (found["cause"], found["ranks"], found["step"]) == ("value from outside torch", [1], 9)
    assert (found["kind"], found["name"]) == ("op", "(model)::aten.add.Tensor")
    assert "images = images + int.from_bytes(os.urandom(4)" in found["op"]["source"]
    runs = sorted(folder.glob("d9m-runs/*/run-*/fit-000"))
    # From the last equal checkpoint, and then from one before the step.
    assert [read_resume(run / "rank-1.jsonl").step for run in runs] == [9, 9, 6, 6]
