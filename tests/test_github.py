"""The action for other projects does its job, and the workflows call what exists."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import yaml

from lightning_d9m.tools.cli.main import main
from lightning_d9m.tools.history.bundle import SIDES

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
_EXPRESSION = re.compile(r"\$\{\{ *([\w.-]+) *\}\}")
COMMAND = f"{sys.executable} train.py"


@pytest.fixture
def use(tmp_path):
    """Return a function that runs the steps of the action, with the file's expressions filled in.

    It gives whether they passed, the verdict and the summary.
    """

    def run_steps(*, differs=False, failing=False, **inputs):
        code = TRAINING.format(tests=str(ROOT / "tests" / "support"), differs=differs)
        (tmp_path / "train.py").write_text("exit(3)" if failing else code)
        values = {
            "github.action_path": str(ROOT),
            "runner.temp": str(tmp_path),
            "github.token": "a token",
            "github.repository": "ann/project",
            **{f"inputs.{name}": str(one.get("default")) for name, one in ACTION["inputs"].items()},
            **{f"inputs.{name}": str(value) for name, value in inputs.items()},
            "inputs.command": COMMAND,
        }

        def run(step):
            """As `shell: bash` is defined for the runner."""
            fill = partial(_EXPRESSION.sub, lambda found: values[found[1]])
            programs = (str(tmp_path), str(Path(sys.executable).parent), os.environ["PATH"])
            own = {name: fill(value) for name, value in step["env"].items()}
            files = {"GITHUB_STEP_SUMMARY": "summary.md", "GITHUB_OUTPUT": "outputs"}
            own |= {name: str(tmp_path / file) for name, file in files.items()}
            words = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", fill(step["run"])]
            environment = {**os.environ, **own, "PATH": os.pathsep.join(programs)}
            return subprocess.run(words, check=False, cwd=tmp_path, env=environment).returncode

        _, compare, comment, keep = ACTION["runs"]["steps"]
        passed = run(compare) == 0
        if "comment" in inputs:
            assert comment["if"] == "always() && inputs.comment != ''"
            assert run(comment) == 0
        assert keep["if"] == "always()"
        verdict = (tmp_path / "outputs").read_text().removeprefix("verdict=").strip()
        return passed, verdict, (tmp_path / "summary.md").read_text()

    return run_steps


@pytest.mark.parametrize(("epochs", "verdict"), [(3, "equal"), (2, "different")])
def test_equal_runs_pass_unless_they_differ_from_the_golden_ledger(
    use, tmp_path, runs, epochs, verdict
):
    golden = runs.write(epochs)
    passed, found, summary = use(golden=golden)
    assert (passed, found) == (verdict == "equal", verdict)
    assert summary.startswith("## 2 runs compared\n\n**equal**: the fits of 2 runs agree")
    assert f"\n## Compared with {golden}\n\n**{verdict}**: " in summary
    assert "<h1>Equal</h1>" in (tmp_path / "d9m/report.html").read_text()
    assert f"<h1>{verdict.capitalize()}</h1>" in (tmp_path / "d9m/golden.html").read_text()


def test_different_runs_fail_and_the_summary_is_a_comment_of_the_pull_request(use, tmp_path):
    """There is no earlier comment to edit."""
    (tmp_path / "gh").write_text(
        f'#!/bin/sh\necho "$GH_REPO $@" >> {tmp_path}/comments\n'
        f'[ "$4" != --edit-last ] && cat "$5" >> {tmp_path}/comments\n'
    )
    (tmp_path / "gh").chmod(0o755)
    passed, verdict, summary = use(differs=True, comment=7)
    assert (passed, verdict) == (False, "different")
    assert "**different**: 1 of 2 runs differs from run 1." in summary
    assert "\n| run | seed | weights | final loss | verdict |\n| --- |" in summary
    assert "\n```\n\nThe artifact `d9m` has this as a page: `report.html`.\n\n" in summary
    assert f"\nNext: `d9m locate -- {COMMAND}` finds the step" in summary
    assert "<h1>Different</h1>" in (tmp_path / "d9m/report.html").read_text()
    shutil.unpack_archive(tmp_path / "d9m/bundle.zip", tmp_path / "packed")
    assert main(["compare", *(str(tmp_path / "packed" / side) for side in SIDES)]) == 1
    first, second, comment = (tmp_path / "comments").read_text().split("\n", 2)
    assert first == f"ann/project pr comment 7 --edit-last --body-file {tmp_path}/d9m.md"
    assert second == f"ann/project pr comment 7 --body-file {tmp_path}/d9m.md"
    assert comment == summary
    assert "## For a bug report\n\n**different**: " in comment


def test_a_command_that_fails_fails(use):
    passed, verdict, summary = use(failing=True)
    assert (passed, verdict) == (False, "failed")
    assert summary == "## 2 runs compared\n\n**failed**: the log of this step says why.\n\n"


def test_the_workflows_run_what_exists():
    script = (ROOT / "dev.py").read_text()
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        text = path.read_text()
        jobs = yaml.safe_load(text)["jobs"].values()
        for line in (step["run"] for job in jobs for step in job["steps"] if "run" in step):
            match shlex.split(line):
                case ["python3", "dev.py", command, *_]:
                    assert f'"{command}"' in script
                case [program, *_]:
                    assert program in ("python", "mkdocs", "mike")
        for name in re.findall(r"'([^']*)'", "".join(re.findall(r"hashFiles\((.*?)\)", text))):
            assert (ROOT / name).exists()


def test_the_image_runs_the_main_job():
    text = (ROOT / "Dockerfile").read_text()
    assert re.search(r"^RUN d9m repeat .* examples/digits\.py", text, re.MULTILINE)
    torch = re.search(r'TORCH = "(.*)"', (ROOT / "dev.py").read_text())[1]
    assert f'"{torch}"' in text
