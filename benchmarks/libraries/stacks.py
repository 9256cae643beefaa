"""Run the wheel of this checkout on several stacks of Python, torch and Lightning.

    python benchmarks/libraries/stacks.py FOLDER [--only NAME ...] [--parts PART ...] [--wheel FILE]

Each stack has a virtual environment in FOLDER, which is made if it is not there, and gets the wheel
that is built here. The interpreter that it names must be on PATH. The parts: ``repeat`` trains
examples/digits.py twice with ``d9m repeat`` and two loader workers, ``resume`` resumes it with
``d9m repeat --interrupt``, ``tests`` runs the tests of hooks, control and the callback from this
checkout against the wheel, each with a time limit of fifteen minutes: from Python 3.14 on, each
loader worker imports torch.
benchmarks/results/stacks.json and its page keep the results; what does not run keeps the result
that was there.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PARTS = ("repeat", "resume", "tests")
TESTS = (
    "tests/test_hooks.py",
    "tests/control/test_session.py",
    "tests/control/test_seeding.py",
    "tests/control/test_settings.py",
    "tests/control/test_environment.py",
    "tests/control/data/test_loaders.py",
    "tests/lightning/resume/test_resume.py",
    "tests/lightning/test_callback.py",
)
COMMON = ("hypothesis", "pytest>=9", "pytest-timeout", "scikit-learn")
VERSIONS = """
import json, platform, numpy, torch, lightning
found = {"python": platform.python_version(), "numpy": numpy.__version__}
print(json.dumps(found | {"torch": torch.__version__, "lightning": lightning.__version__}))
"""
# Processes that a test spawns import the tests, too, and the wheel before the checkout.
PYTEST = """
import sys, pytest
sys.path.append(sys.argv.pop(1))
sys.exit(pytest.main())
"""


class Stack:
    """A stack: its interpreter, versions of torch and Lightning, and other packages."""

    def __init__(self, python: str, torch: str, lightning: str, *others: str) -> None:
        self.python = python
        both = (f"lightning=={lightning}", f"pytorch-lightning=={lightning}")
        self.packages = (f"torch=={torch}", *both, *others)


# Lightning 2.2 and 2.3 import pkg_resources, which setuptools 80 and later no longer has.
OLD = ("numpy==1.26.4", "setuptools<80")
STACKS = {
    "oldest": Stack("python3.10", "2.4.1", "2.2.5", *OLD),
    "torch-2.6": Stack("python3.11", "2.6.0", "2.3.3", *OLD),
    "torch-2.8": Stack("python3.12", "2.8.0", "2.4.0"),
    "torch-2.10": Stack("python3.11", "2.10.0", "2.5.6"),
    "torch-2.13": Stack("python3.12", "2.13.0", "2.6.1"),
    "newest": Stack("python3.13", "2.15.0", "2.6.6"),
    "python-3.14": Stack("python3.14", "2.15.0", "2.6.6"),
}


def run(
    *command: object, log: Path, cwd: str | Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command, and add what it prints to a log."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [str(word) for word in command],
        env=environment,
        cwd=cwd or log.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    with log.open("a") as stream:
        stream.write(f"$ {' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done


def build_wheel(folder: Path) -> Path:
    """Build the wheel of this checkout."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True)
    return next(folder.glob("*.whl"))


def install(environment: Path, stack: Stack, wheel: Path, log: Path) -> Path:
    """Install a stack and the wheel; return the folder of the environment's programs."""
    programs = environment / "bin"
    pip = (programs / "python", "-m", "pip", "install", "-q")
    steps: list[tuple[object, ...]] = [(*pip, "--no-deps", "--force-reinstall", wheel)]
    if not programs.exists():
        steps.insert(0, (*pip, *stack.packages, *COMMON, wheel))
        steps.insert(0, (stack.python, "-m", "venv", environment))
    for step in steps:
        if run(*step, log=log).returncode:
            raise SystemExit(f"{step} failed; see {log}")
    return programs


def train(programs: Path, log: Path, *options: str) -> dict[str, Any]:
    """Run ``d9m repeat`` on the digits; return its verdict and the digests of the weights."""
    script = ROOT / "examples" / "digits.py"
    program = (programs / "python", script, "--epochs", 2, "--workers", 2)
    with tempfile.TemporaryDirectory() as folder:
        command = (programs / "d9m", "repeat", *options, "-o", Path(folder, "runs"), "--json")
        done = run(*command, "--", *program, log=log)
    digests = re.findall(r'"weights": ?"([0-9a-f]{32})"', done.stdout)
    lines = [*done.stdout.splitlines(), *done.stderr.splitlines()] or [""]
    verdict = {0: "equal", 1: "different"}.get(done.returncode, lines[-1])
    return {"verdict": verdict, "weights": sorted(set(digests))}


def run_tests(programs: Path, log: Path) -> dict[str, Any]:
    """Run the tests against the wheel; warnings of old packages do not fail them."""
    options = (
        "-q",
        "-o",
        "filterwarnings=",
        "-p",
        "no:cacheprovider",
        "--timeout=900",
        "--durations=20",
        f"--rootdir={ROOT}",
    )
    paths = [ROOT / path for path in TESTS]
    command = (programs / "python", "-c", PYTEST, ROOT, *options, "-c", ROOT / "pyproject.toml")
    done = run(*command, *paths, log=log)
    counts = re.findall(r"(\d+) (passed|failed|skipped|error)", done.stdout.splitlines()[-1])
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    return {kind: int(number) for number, kind in counts} | ({"names": failed} if failed else {})


def write(results: dict[str, Any]) -> None:
    """Write the results as JSON and as a table."""
    RESULTS.joinpath("stacks.json").write_text(json.dumps(results, indent=2) + "\n")
    lines = [
        "| stack | Python | torch | Lightning | NumPy | two runs | resumed | tests | date |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, found in results.items():
        tests = found.get("tests", {})
        counts = ", ".join(f"{v} {k}" for k, v in tests.items() if k != "names") or "not run"
        verdicts = [found.get(part, {}).get("verdict", "not run") for part in PARTS[:2]]
        versions = [found[key] for key in ("python", "torch", "lightning", "numpy")]
        lines.append(f"| {' | '.join([name, *versions, *verdicts, counts, found['date']])} |")
    RESULTS.joinpath("stacks.md").write_text("\n".join(lines) + "\n")


def main() -> None:
    """Run the stacks one after the other."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="+", choices=STACKS, default=list(STACKS))
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--wheel", type=Path, help="do not build one, but take this one")
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    wheel = arguments.wheel or build_wheel(folder / "wheel")
    for name in arguments.only:
        log = folder / f"{name}.log"
        programs = install(folder / name, STACKS[name], wheel.resolve(), log)
        found = json.loads(run(programs / "python", "-c", VERSIONS, log=log).stdout)
        found["date"] = f"{datetime.now(timezone.utc):%Y-%m-%d}"
        if "repeat" in arguments.parts:
            found["repeat"] = train(programs, log)
        if "resume" in arguments.parts:
            found["resume"] = train(programs, log, "--interrupt")
        if "tests" in arguments.parts:
            found["tests"] = run_tests(programs, log)
        # Read again: another process may run another stack.
        kept = RESULTS / "stacks.json"
        results = json.loads(kept.read_text()) if kept.exists() else {}
        write(results | {name: results.get(name, {}) | found})
        print(name, json.dumps(found))


if __name__ == "__main__":
    main()
