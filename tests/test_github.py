"""The action for other projects does its job, and the workflows call what exists."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from lightning_d9m.cli.main import main

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
# Stands for an interpreter: notes its arguments.
PIP = '#!/bin/sh\necho "$@" >> {}\n'
_EXPRESSION = re.compile(r"\$\{\{ *([\w.-]+) *\}\}")


class Job:
    """A job that uses the action, as GitHub's runner runs it, in folders of a test.

    The steps run in order with the file's expressions filled in. A step after one that failed is
    left out unless it says ``always()``. `upload-artifact` copies, and refuses a name twice.
    """

    def __init__(self, folder):
        self.project = folder / "project"
        self.project.mkdir()
        self._programs = folder / "bin"
        self._programs.mkdir()
        self._temporary, self.artifacts = folder / "runner", folder / "artifacts"
        self._temporary.mkdir()
        self._summary, self._outputs = folder / "summary.md", folder / "outputs"
        self.installed = folder / "installed"

    def train(self, *, differs=False):
        """Write the program that the action runs."""
        code = TRAINING.format(tests=str(ROOT / "tests" / "support"), differs=differs)
        (self.project / "train.py").write_text(code)

    def fake_gh(self):
        """Let `gh` note its arguments and the comment; it has no earlier comment to edit."""
        noted = self._programs.parent / "comments"
        code = f'#!/bin/sh\necho "$GH_REPO $@" >> {noted}\n'
        code += f'[ "$4" != --edit-last ] && cat "$5" >> {noted}\n'
        (self._programs / "gh").write_text(code)
        (self._programs / "gh").chmod(0o755)
        return noted

    def fake_python(self):
        """Let `python` note what it is asked to do."""
        (self._programs / "python").write_text(PIP.format(self.installed))
        (self._programs / "python").chmod(0o755)

    def use(self, **inputs):
        """Run the action; return whether it passed, the summary and the output."""
        given = {name.replace("_", "-"): value for name, value in inputs.items()}
        assert given.keys() <= ACTION["inputs"].keys()
        self._values = {
            "github.action_path": str(ROOT),
            "runner.temp": str(self._temporary),
            "github.token": "a token",
            "github.repository": "ann/project",
            **{f"inputs.{name}": str(one.get("default")) for name, one in ACTION["inputs"].items()},
            **{f"inputs.{name}": str(value) for name, value in given.items()},
        }
        passed = True
        for step in ACTION["runs"]["steps"]:
            condition = step.get("if", "success()")
            always = condition.startswith("always()")
            condition = condition.removeprefix("always()").removeprefix(" && ") or "success()"
            if (passed or always) and self._holds(condition):
                passed = self._run(step) and passed
        written = dict(line.split("=") for line in self._outputs.read_text().splitlines())
        self._values |= {f"steps.compare.outputs.{name}": one for name, one in written.items()}
        verdict = self._fill(ACTION["outputs"]["verdict"]["value"])
        return SimpleNamespace(passed=passed, summary=self._summary.read_text(), verdict=verdict)

    def _holds(self, condition):
        if condition == "success()":
            return True
        name, value = re.fullmatch(r"([\w.-]+) != '(.*)'", condition).groups()
        return self._values[name] != value

    def _fill(self, text):
        return _EXPRESSION.sub(lambda found: self._values[found[1]], text)

    def _run(self, step):
        if "uses" in step:
            assert step["uses"].startswith("actions/upload-artifact@")
            target = self.artifacts / self._fill(step["with"]["name"])
            source = Path(self._fill(step["with"]["path"]))
            if source.exists():
                shutil.copytree(source, target)
            return source.exists() or step["with"]["if-no-files-found"] == "ignore"
        folders = (str(self._programs), str(Path(sys.executable).parent), os.environ["PATH"])
        done = subprocess.run(
            # As `shell: bash` is defined for the runner.
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", self._fill(step["run"])],
            check=False,
            cwd=self.project / self._fill(step.get("working-directory", ".")),
            env={
                **os.environ,
                "GITHUB_STEP_SUMMARY": str(self._summary),
                "GITHUB_OUTPUT": str(self._outputs),
                "PATH": os.pathsep.join(folders),
                **{name: self._fill(value) for name, value in step.get("env", {}).items()},
            },
        )
        return done.returncode == 0


@pytest.fixture
def job(tmp_path):
    return Job(tmp_path)


COMMAND = f"{sys.executable} train.py"


def test_equal_runs_pass_and_leave_reports(job, runs):
    job.train()
    golden = runs.write(3)
    done = job.use(command=COMMAND, golden=golden, install="")
    assert (done.passed, done.verdict) == (True, "equal")
    assert done.summary.startswith("## 2 runs compared\n\n**equal**: the fits of 2 runs agree")
    assert f"\n## Compared with {golden}\n\n**equal**: " in done.summary
    for name in ("report.html", "golden.html"):
        assert "Weights of both runs" in (job.artifacts / "d9m" / name).read_text()
    assert [path.name for path in job.project.iterdir()] == ["train.py"]


def test_different_runs_fail_and_the_summary_is_a_comment_of_the_pull_request(job):
    job.train(differs=True)
    noted = job.fake_gh()
    done = job.use(command=COMMAND, install="", comment=7)
    assert (done.passed, done.verdict) == (False, "different")
    assert "**different**: 1 of 2 runs differs from run 1." in done.summary
    assert "\n```\n\nThe artifact `d9m` has this as a page: `report.html`.\n\n" in done.summary
    assert f"\nNext: `d9m locate -- {COMMAND}` finds the step" in done.summary
    kept = job.artifacts / "d9m"
    assert "<h1>Different</h1>" in (kept / "report.html").read_text()
    assert (kept / "run-002" / "fit-000").is_dir()
    assert main(["bundle", "open", str(kept / "bundle.zip")]) == 1
    path = job.artifacts.parent / "runner" / "d9m.md"
    first, second, comment = noted.read_text().split("\n", 2)
    assert first == f"ann/project pr comment 7 --edit-last --body-file {path}"
    assert second == f"ann/project pr comment 7 --body-file {path}"
    assert comment == done.summary
    assert "## For a bug report\n\n**different**: " in comment


def test_a_training_that_differs_from_the_golden_ledger_fails(job, runs):
    job.train()
    done = job.use(command=COMMAND, golden=runs.write(2), install="", artifact="golden")
    assert (done.passed, done.verdict) == (False, "different")
    assert "**equal**: the fits of 2 runs agree bit for bit" in done.summary
    assert "\n\n**different**: " in done.summary
    kept = job.artifacts / "golden"
    assert "<h1>Equal</h1>" in (kept / "report.html").read_text()
    assert "<h1>Different</h1>" in (kept / "golden.html").read_text()


def test_a_command_that_fails_fails(job):
    (job.project / "part").mkdir()
    done = job.use(command="exit 3", install="", working_directory="part")
    assert (done.passed, done.verdict) == (False, "failed")
    assert done.summary == "## 2 runs compared\n\n**failed**: the log of this step says why.\n\n"


@pytest.mark.parametrize(
    ("install", "installed"), [("action", str(ROOT)), ("lightning-d9m[lightning]", None)]
)
def test_the_package_is_installed_first(job, install, installed):
    job.fake_python()
    job.use(command="exit 3", install=install)
    assert job.installed.read_text() == f"-m pip install {installed or install}\n"


def test_the_workflows_run_what_exists():
    project = (ROOT / "pyproject.toml").read_text()
    script = (ROOT / "dev.py").read_text()
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        text = path.read_text()
        for job in yaml.safe_load(text)["jobs"].values():
            used = [step["uses"] for step in job["steps"] if "uses" in step]
            runs = [step["run"] for step in job["steps"] if "run" in step]
            if runs:
                assert used[0].startswith("actions/checkout@")
                assert used[1].startswith("actions/setup-python@")
            for line in runs:
                check_line(line, project, script)
        for name in re.findall(r"'([^']*)'", "".join(re.findall(r"hashFiles\((.*?)\)", text))):
            assert (ROOT / name).exists()


def check_line(line, project, script):
    match shlex.split(line):
        case ["python", "-m", "pip", "install", "--upgrade", "pip>=25.1"]:
            assert '"--upgrade", "pip>=25.1"' in script
        case ["python", "-m", "pip", "install", "--group", group]:
            assert f"\n{group} = [" in project.partition("[dependency-groups]")[2]
        case ["mkdocs", "build", "--strict"]:
            assert 'run("mkdocs", "build", "--strict"' in script
        case ["mike", "deploy" | "set-default", *_, "latest"]:
            assert '"mike>=' in project
        case ["python3", "dev.py", command, *_]:
            assert f'"{command}"' in script
        case other:
            pytest.fail(f"not a command of this project: {other}")


def test_a_release_is_published_by_trust_and_attested_only_after_the_wheel_was_checked():
    jobs = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())["jobs"]
    assert [jobs[name].get("needs") for name in jobs] == [None, "build", "check", "publish"]
    stacks = [entry["stack"] for entry in jobs["check"]["strategy"]["matrix"]["include"]]
    assert stacks == ["oldest", "newest"]
    publish = jobs["publish"]
    assert publish["permissions"] == {"id-token": "write", "attestations": "write"}
    *_, attested, published = publish["steps"]
    assert attested["uses"].startswith("actions/attest-build-provenance@")
    assert published["with"] == {"attestations": True}  # no password: the identity is enough
    # mike commits, and refuses to without an identity.
    assert jobs["docs"]["env"].keys() == {"GIT_COMMITTER_NAME", "GIT_COMMITTER_EMAIL"}


def test_the_image_runs_the_main_job():
    text = (ROOT / "Dockerfile").read_text()
    assert re.search(r"^RUN d9m repeat .* examples/digits\.py", text, re.MULTILINE)
    torch = re.search(r'TORCH = "(.*)"', (ROOT / "dev.py").read_text())[1]
    assert f'"{torch}"' in text
