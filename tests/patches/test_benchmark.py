"""The benchmark of the patches: a failure is a row, and what was measured is written."""

import json
import os
import re
import subprocess
import sys
import tarfile
from argparse import Namespace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
MARK = "pytest.mark." + "cuda"
LONG = 300.0  # seconds, of which none is waited for


def load_benchmark():
    """Import the script."""
    spec = spec_from_file_location("patches_benchmark", FOLDER / "patches.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


benchmark = load_benchmark()
FAKE = """
import json, sys, time
def say(answer): print(json.dumps(answer), flush=True)
say({"device": "A device", "torch": "2.13"})
op = {"offered": False, "original_us": 2.0, "original_outputs": 5, "patched_us": 3.0,
      "patched_outputs": 1, "ratio": 1.5, "difference": 0.0}
for line in sys.stdin:
    task = line.strip()
    if task == "list":
        names = ["good", "refused", "ended", "unreadable", "lost", "again"]
        say({"ops": [{"task": name, "op": name, "shape": "-"} for name in names], "models": []})
    elif task == "refused": say({"error": "ValueError: no"})
    elif task == "lost": say({"error": "RuntimeError: CUDA error", "fatal": True})
    elif task == "ended": sys.exit(7)
    elif task == "unreadable": print("}", flush=True)
    elif task == "silent": time.sleep(600)
    else: say(op)
"""


@pytest.fixture
def worker():
    """Answer as the real one does, and fail in each way."""
    fake = benchmark.Worker([sys.executable, "-c", FAKE])
    yield fake
    fake.close()


def test_every_failure_is_a_row(worker) -> None:
    """And the rows after it are measured by a new process; each row is written as it comes."""
    written = []
    words = Namespace(rounds=1, calls=2, seconds=LONG, limit=LONG)
    result = benchmark.measure_all(worker, words, lambda so_far: written.append(len(so_far["ops"])))
    errors = [row.get("error") for row in result["ops"]]
    assert errors[:3] == [None, "ValueError: no", "the worker ended with status 7"]
    assert "Expecting value" in errors[3]
    assert errors[4:] == ["RuntimeError: CUDA error", None]
    assert written == [1, 2, 3, 4, 5, 6]
    page = benchmark.render(result)
    assert "| refused | - | failed: ValueError: no |" in page
    assert "geometric mean 1.50" in page
    assert "not reached: 4." in page


def test_silence_ends_the_worker_and_not_the_run(worker) -> None:
    """The process is replaced."""
    assert worker.ask("good", LONG)["ratio"] == 1.5
    assert worker.ask("silent", 0.01) == {"error": "no answer within 0.01 seconds"}
    assert worker.ask("good", LONG)["ratio"] == 1.5


def test_what_no_time_is_left_for_says_so(worker) -> None:
    """With no time left every row has an error."""
    words = Namespace(rounds=1, calls=2, seconds=0.0, limit=LONG)
    result = benchmark.measure_all(worker, words, lambda _: None)
    assert {row["error"] for row in result["ops"]} == {"out of time"}


def test_a_worker_that_cannot_start_is_said() -> None:
    """At once, and not as a row for each op."""
    absent = benchmark.Worker([sys.executable, "-c", "raise SystemExit(5)"])
    words = Namespace(rounds=1, calls=2, seconds=LONG, limit=LONG)
    with pytest.raises(SystemExit, match="does not start: the worker ended with status 5"):
        benchmark.measure_all(absent, words, lambda _: None)


def test_it_runs_on_a_cpu(tmp_path: Path) -> None:
    """One op, through the real worker: a row, a page, and no other file."""
    arguments = [
        "--device",
        "cpu",
        "--calls",
        "2",
        "--rounds",
        "1",
        "--only",
        "adaptive_max_pool3d",
    ]
    subprocess.run(
        [sys.executable, FOLDER / "patches.py", *arguments, "--output", tmp_path],
        check=True,
        capture_output=True,
        timeout=240,
    )
    files = {path.suffix: path for path in tmp_path.iterdir()}
    assert set(files) == {".json", ".md"}
    [row] = json.loads(files[".json"].read_text())["ops"]
    assert row["patched_outputs"] == 1
    assert row["difference"] < 1e-5
    assert "| adaptive_max_pool3d_backward | 9 to 29 |" in files[".md"].read_text()


FAKE_PYTHON = """\
#!/usr/bin/env bash
case "$*" in
  -c*) exit ${NO_DEVICE:-0} ;;
  *digest.py*) exit 3 ;;
  *) echo "called: $*" ;;
esac
"""


def run_suite(folder: Path, *parts: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the suite with an interpreter that says what it is asked, and fails at one part."""
    python = folder / "python"
    python.write_text(FAKE_PYTHON)
    python.chmod(0o755)
    return subprocess.run(
        ["bash", FOLDER / "gpu_suite.sh", folder / "out", *parts],
        env={"PATH": os.environ["PATH"], "PYTHON": str(python), **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_the_suite_needs_a_device(tmp_path: Path) -> None:
    """It says so, and runs nothing."""
    done = run_suite(tmp_path, NO_DEVICE="1")
    assert done.returncode == 2
    assert "finds no torch with a CUDA device (set PYTHON to another)" in done.stderr
    assert done.stdout == ""


def test_the_suite_runs_every_part_whatever_the_others_say(tmp_path: Path) -> None:
    """Each has a log; one that fails is named, and the status tells."""
    done = run_suite(tmp_path)
    parts = ["patches", "tests", "example", "digest", "probes", "audit", "paper", "graphsage"]
    assert [line[3:] for line in done.stdout.splitlines() if line.startswith("== ")] == parts
    assert {path.stem for path in (tmp_path / "out").glob("*.log")} == set(parts)
    assert done.stderr == "gpu_suite.sh: digest ended with status 3\n"
    with tarfile.open(tmp_path / "out" / "results.tgz") as archive:
        assert {Path(name).stem for name in archive.getnames() if name.endswith(".log")} == set(
            parts
        )
    assert done.returncode == 1
    alone = run_suite(tmp_path, "patches")
    assert (alone.returncode, alone.stdout.count("== ")) == (0, 1)
    assert run_suite(tmp_path, "pathces").returncode == 2


def test_every_file_that_the_suite_runs_is_there() -> None:
    """No part can fail on a CUDA machine for a name that nobody tried."""
    script = (FOLDER / "gpu_suite.sh").read_text()
    files = set(re.findall(r"\b(?:benchmarks|tests|examples)/[\w/]+\.py", script))
    assert len(files) == 9
    for file in files:
        assert (FOLDER.parent / file).is_file(), file
    marked = {path for path in FOLDER.parent.glob("tests/**/test_*.py") if MARK in path.read_text()}
    assert {str(path.relative_to(FOLDER.parent)) for path in marked} <= files
