"""``d9m goto``: the state that a debugger shows is that of the run, by the program's own hashes."""

import io
import json
import os
import pty
import re
import subprocess
import sys
from functools import cache

import pytest
import torch
from scripts import ROOT, execute

from lightning_d9m.engine.ledger.folder import read_ledger
from lightning_d9m.engine.ledger.format.records import Batch
from lightning_d9m.engine.recording.interruption import FOLDER, INTERRUPT, read_request
from lightning_d9m.engine.recording.step_debugger import StepDebugger
from lightning_d9m.errors import SettingError
from lightning_d9m.tools.cli.main import main
from lightning_d9m.tools.segments.goto import _holds_finite

PROGRAM = str(ROOT / "tests/support/goto_training.py")
STATE = "p fingerprint(self, batch)"


@pytest.fixture(scope="module")
def run(tmp_path_factory, forking_python):
    """Return a function that trains straight, once for each (ranks, what)."""

    @cache
    def train(ranks, *what):
        folder = tmp_path_factory.mktemp("run")
        command = (forking_python, PROGRAM, folder, *what)
        done = execute(*command, fails=True, RANKS=str(ranks))
        assert done.returncode == int("crash" in what), done.stderr
        return folder, done.stderr

    return train


@pytest.fixture
def goto(tmp_path, forking_python):
    """Return a function that goes to a step on a terminal, types, and returns status and output."""

    def go(folder, *words, typed="", ranks=1, program=()):
        ledger = next(folder.glob("fit-*"))
        steps = [word for word in words[:1] if word.isdecimal()]
        words = [*steps, str(ledger), *words[len(steps) :], "-o", str(tmp_path / "out")]
        command = [forking_python, PROGRAM, str(folder), *program]
        outer, inner = pty.openpty()
        process = subprocess.Popen(
            [forking_python, "-m", "lightning_d9m", "goto", *words, "--", *command],
            env=os.environ | {"RANKS": str(ranks), "TERM": "dumb", "COLUMNS": "300"},
            stdin=inner, stdout=inner, stderr=inner, start_new_session=True,
        )  # fmt: skip
        os.close(inner)
        os.write(outer, typed.encode())
        output = b""
        while True:
            try:
                part = os.read(outer, 4096)
            except OSError:  # all processes have closed their end
                break
            output += part
        os.close(outer)
        return process.wait(), output.decode()

    return go


@pytest.mark.parametrize(("ranks", "rank"), [(1, 0), (2, 0), (2, 1)])
def test_the_debugger_shows_the_state_of_the_step(run, goto, ranks, rank):
    folder, _ = run(ranks)
    seen = (folder / f"seen-{rank}").read_text().splitlines()
    saved = sorted((folder / "saved").iterdir())
    status, output = goto(folder, "10", "--rank", str(rank), typed=f"{STATE}\nc\n", ranks=ranks)
    assert status == 0, output
    assert re.findall(r"'([0-9a-f]{64})'", output) == [seen[10]]
    assert "equal: steps 9 to 10 of 0 to 16" in output
    assert "training_step()\r\n-> SEEN.append" in output  # the first line that is shown
    assert sorted((folder / "saved").iterdir()) == saved


@pytest.mark.parametrize(
    ("words", "typed", "opens"), [([], "", False), (["--anyway"], "q\n", True)]
)
def test_a_program_that_differs_is_stopped(run, goto, words, typed, opens):
    status, output = goto(run(1)[0], "11", *words, typed=typed, program=["label"])
    assert status == (not opens)
    assert "different: " in output
    assert ("(Pdb)" in output) == opens
    assert "Traceback" not in output


def test_a_step_in_an_exception_is_returned_to_by_the_line_that_it_printed(run, goto):
    folder, said = run(1, "crash")
    assert re.search(rf"To return to step 9: d9m goto 9 \S*fit-000 -- python {PROGRAM}", said)
    status, output = goto(folder, "9", typed=f"{STATE}\nn\nn\nq\n", program=["crash"])
    assert (status, "Pdb" in output, "ValueError" in output) == (0, True, False), output


def test_a_trace_has_the_probes_of_the_step(run, goto, tmp_path):
    folder, _ = run(1)
    status, output = goto(folder, "10", "--trace", "--json")
    facts = json.loads(output[output.index("{") :])
    assert (status, facts["step"], facts["comparison"]["verdict"]) == (0, 10, "equal")
    batches = [own for own in read_ledger(facts["trace"]).records(0) if isinstance(own, Batch)]
    assert {own.step for own in batches} == {10}
    kinds = {place[0] for own in batches for layout in own.layouts for place in layout}
    assert {"batch", "output", "gradient", "weight"} <= kinds


def test_the_first_value_that_is_not_finite_is_found(run, goto):
    folder, said = run(1, "nan")
    status, output = goto(folder, "--first-nonfinite", typed=f"{STATE}\nc\n", program=["nan"])
    seen = (folder / "seen-0").read_text().splitlines()
    assert re.search(r"not finite: d9m goto --first-nonfinite \S*fit-000 -- python", said)
    assert status == 0
    assert "The loss of training_step is not finite in step 9 (rank 0)" in output
    assert "checkpoint of step 9 (the last one with finite weights)" in output
    assert re.findall(r"'([0-9a-f]{64})'", output) == [seen[9]]


@pytest.mark.parametrize(
    ("what", "state"),
    [
        ("loop", "p fingerprint(model, batch)"),
        ("hosted", "p fingerprint(model, inputs.values())"),
    ],
)
def test_other_loops(run, goto, what, state):
    folder, _ = run(1, what)
    status, output = goto(folder, "10", typed=f"{state}\nc\n", program=[what])
    seen = (folder / "seen-0").read_text().splitlines()
    assert status == 0, output
    assert re.findall(r"'([0-9a-f]{64})'", output) == [seen[10]]


def test_a_command_that_does_not_reach_the_step(run, goto):
    status, output = goto(run(1)[0], "10", program=["loop"])
    assert status in (2, 3), output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["16"], "has no step 16; allowed: 0 to 15."),
        (["10"], "pdb reads from the terminal, and the standard input is not one"),
        (["10", "--json"], "--json is for --trace: a debugger prints what you type."),
        ([], "Give the step, or --first-nonfinite"),
        (["3", "--rank", "1"], "--rank is 1, and the run has 1 rank; allowed: 0 to 0."),
    ],
)
def test_a_wrong_request(run, capsys, monkeypatch, words, message):
    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert (
        main(["goto", *words[:1], str(run(1)[0] / "fit-000"), *words[1:], "--", "python", "x.py"])
        == 2
    )
    assert message in " ".join(capsys.readouterr().err.split())


def test_weights_of_each_type_are_looked_at(tmp_path):
    """Some types of 8 bits cannot say whether they are finite."""
    for value, is_finite in ((1.0, True), (float("nan"), False)):
        weights = {
            "a": torch.full((2,), value).to(torch.float8_e4m3fn),
            "b": torch.ones(2, dtype=int),
        }
        torch.save(weights | {"c": torch.full((1,), 1e300, dtype=torch.float64)}, tmp_path / "w.pt")
        assert _holds_finite(tmp_path / "w.pt") == is_finite


def test_a_ledger_that_is_forgotten(capsys):
    assert main(["goto", "30", "--", "python", "x.py"]) == 2
    assert "Give it behind the step: d9m goto 30 LEDGER" in " ".join(
        capsys.readouterr().err.split()
    )


def test_a_debugger_that_is_absent_or_has_no_terminal(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "IPython.terminal.debugger", None)
    monkeypatch.setattr("lightning_d9m.engine.recording.interruption._FaultState.fits", 0)
    with pytest.raises(SettingError, match="pip install ipdb"):
        read_request({INTERRUPT: "debug:0:ipdb:3:x", FOLDER: str(tmp_path)})
    monkeypatch.setattr("sys.stdin", io.StringIO())
    debugger = StepDebugger("pdb", 1, "")
    debugger.check_terminal(0)
    with pytest.raises(SettingError, match="Rank 1 cannot read from the terminal"):
        debugger.check_terminal(1)
