"""The action for other projects does its job, and the workflows call what exists."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
ACTION = yaml.safe_load((ROOT / "action.yml").read_text())
# Leaves one ledger, as a training would.
TRAINING = """
import os, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from ledger_runs import Runs
folder = Path(os.environ["LIGHTNING_D9M_LEDGER_DIR"])
Runs(folder).write(2 if {differs} and folder.name == "run-002" else 3)
"""


@pytest.fixture
def act(tmp_path, monkeypatch):
    """Return a function that runs the action's main step; it gives (status, summary, outputs)."""

    def act(*, differs=False, golden=""):
        code = TRAINING.format(tests=str(ROOT / "tests" / "support"), differs=differs)
        (tmp_path / "train.py").write_text(code)
        variables = {
            "COMMAND": f"{sys.executable} train.py",
            "RUNS": "2",
            "GOLDEN": str(golden),
            "OUTPUT": str(tmp_path / "d9m"),
            "GITHUB_STEP_SUMMARY": str(tmp_path / "summary.md"),
            "GITHUB_OUTPUT": str(tmp_path / "outputs"),
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        }
        done = subprocess.run(
            ["bash", ROOT / ".github" / "action.sh"],
            check=False,
            cwd=tmp_path,
            env=os.environ | variables,
            capture_output=True,
            text=True,
        )
        summary = (tmp_path / "summary.md").read_text()
        return done.returncode, summary, (tmp_path / "outputs").read_text()

    return act


def test_equal_runs_pass_and_leave_a_report(act, tmp_path, runs):
    golden = runs.write(3)
    status, summary, outputs = act(golden=golden)
    assert (status, outputs) == (0, "verdict=equal\n")
    assert "**equal**: 2 runs agree bit for bit" in summary
    assert f"## Compared with {golden}\n\n**equal**: " in summary
    assert "Weights of both runs" in (tmp_path / "d9m" / "report.html").read_text()


def test_different_runs_fail(act):
    status, summary, outputs = act(differs=True)
    assert (status, outputs) == (1, "verdict=different\n")
    assert "**different**: 1 of 2 runs differs from run 1." in summary


def test_a_training_that_differs_from_the_golden_ledger_fails(act, runs):
    status, summary, outputs = act(golden=runs.write(2))
    assert (status, outputs) == (1, "verdict=different\n")
    assert "**equal**: 2 runs agree bit for bit" in summary
    assert "\n\n**different**: " in summary


def test_the_action_hands_its_inputs_to_the_script():
    (step,) = (step for step in ACTION["runs"]["steps"] if step.get("id") == "compare")
    read = set(re.findall(r"\$\{?([A-Z]+)\b", (ROOT / ".github" / "action.sh").read_text()))
    assert {name for name in read if not name.startswith("GITHUB")} == set(step["env"])
    used = set(re.findall(r"inputs\.([\w-]+)", (ROOT / "action.yml").read_text()))
    assert used == set(ACTION["inputs"])


def test_the_workflows_run_what_exists():
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        workflow = yaml.safe_load(path.read_text())
        steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
        assert any("uses" in step and step["uses"].startswith("actions/checkout") for step in steps)
    tests = (ROOT / ".github/workflows/tests.yml").read_text()
    assert "python3 dev.py test" in tests
    for file in re.findall(r"hashFiles\((.*?)\)", tests):
        for name in re.findall(r"'(.*?)'", file):
            assert (ROOT / name).exists()


def test_the_image_runs_the_main_job():
    text = (ROOT / "Dockerfile").read_text()
    assert re.search(r"^RUN d9m repeat .* examples/digits\.py", text, re.MULTILINE)
    torch = re.search(r'TORCH = "(.*)"', (ROOT / "dev.py").read_text())[1]
    assert f'"{torch}"' in text
