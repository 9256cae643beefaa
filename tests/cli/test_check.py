"""``d9m check`` names what it cannot check, and why a segment differs, of programs without torch."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ledger_program import PROGRAM

# A run without checkpoints: its one segment is the whole of it.
WHOLE = PROGRAM + "\ntrain({}, obeys=False)\n" + '(checkpoints / "killed").touch()\n'


@pytest.fixture
def check(tmp_path, monkeypatch, d9m):
    """Return a function that trains, changes the program, and checks the run."""
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "script.py"

    def run(value, *options, first="7"):
        words = ("--", sys.executable, script)
        script.write_text(WHOLE.format(first).replace("(checkpoints", "0 and (checkpoints"))
        monkeypatch.setenv("LIGHTNING_D9M_LEDGER_DIR", "trained")
        if not Path("trained").exists():
            subprocess.run([sys.executable, script], check=True)
        script.write_text(WHOLE.format(value))
        status, out, errors = d9m("check", "trained", *options, *words)
        return status, " ".join(out.split()), errors

    return run


AGAIN = 'ledgers.name.endswith("again")'


@pytest.mark.parametrize(
    ("value", "status", "said"),
    [
        ("7", 0, "equal: 1 of 1 segment (100.0% of 1 step)"),
        ("8", 1, "persistent"),
        (f"7 if {AGAIN} else 8", 1, "transient"),
        (f"9 if {AGAIN} else 8", 1, "program"),
        ("7, settings={'portable': True}", 1, "refused"),
        ("8, stack={'threads.intraop': 2}", 1, "unclear"),
    ],
)
def test_a_second_run_says_what_kind_a_difference_is(check, value, status, said):
    found, out, errors = check(value)
    assert (found, said in out) == (status, True), out + errors
    assert "The run saved no checkpoints, so its one segment is the whole run." in out
