"""The suite for a CUDA machine: a failure is a row, and nothing that was measured is lost."""

import importlib
import json
import os
import re
import subprocess
import sys
import tarfile
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lightning_d9m.audit import device

FOLDER = Path(__file__).parents[2] / "benchmarks"
MARK = "pytest.mark." + "cuda"
LONG = 300.0  # seconds, of which none is waited for
FAKE = """
import json, os, sys, time
def say(answer): print(json.dumps(answer), flush=True)
say({"device": "A device", "torch": "2.13"})
time_of = lambda us: {"device_us": us, "host_us": 1.0, "peak_mb": 2.0}
for line in sys.stdin:
    word, _, task = line.strip().partition(" ")
    if word == "list" and task == "speed":
        say({"tasks": ["good", "refused", "ended", "unreadable", "lost", "again"]})
    elif word == "list" and task == "smoke": say({"tasks": ["silent"]})
    elif word == "list": say({"tasks": []} if task != "models" else {"error": "no list"})
    elif task == "refused": say({"error": "ValueError: no"})
    elif task == "lost": say({"error": "RuntimeError: CUDA error", "fatal": True})
    elif task == "ended": sys.exit(7)
    elif task == "unreadable": print("}", flush=True)
    elif task == "silent": time.sleep(600)
    else: say({"op": task, "status": "patched", "original": time_of(2.0), "patched": time_of(3.0),
               "patched_fill_off": time_of(2.5), "ratio": 1.5, "pid": os.getpid()})
"""


@pytest.fixture
def modules(monkeypatch):
    """Return the scripts of the suite, which import each other by name."""
    monkeypatch.syspath_prepend(str(FOLDER))
    names = ("suite_client", "suite_report", "gpu_suite")
    yield [importlib.import_module(name) for name in names]
    for name in names:
        del sys.modules[name]


@pytest.fixture
def suite(modules, tmp_path):
    """Return a function that makes a call of the suite with a worker that fails in each way."""
    client, _, script = modules
    workers = []

    def make(commands=None, *, seconds=LONG):
        workers.append(client.Worker([sys.executable, "-c", FAKE]))
        folder = tmp_path / "out"
        folder.mkdir(exist_ok=True)
        return script.Suite(folder, workers[-1], commands or {}, seconds=seconds)

    yield make
    for worker in workers:
        worker.close()


def read_archive(folder):
    with tarfile.open(folder / "results.tgz") as archive:
        return {member.name: archive.extractfile(member).read().decode() for member in archive}


def test_every_failure_is_a_row(suite, tmp_path, capsys):
    """And the rows after it are measured by a new process; the report and the archive have all."""
    made = suite()
    assert made.run(["speed", "models"]) == 1
    rows = {row["task"]: row for row in made.journal.of_part("speed")}
    errors = [row.get("error") for row in rows.values()]
    assert errors[:3] == [None, "ValueError: no", "the worker ended with status 7"]
    assert "Expecting value" in errors[3]
    assert errors[4:] == ["RuntimeError: CUDA error", None, None]
    assert rows["good"]["pid"] != rows["again"]["pid"]
    assert rows["part"]["state"] == "4 of 6 rows failed"
    assert made.journal.of_part("models")[0]["state"] == "failed: no list"
    files = read_archive(tmp_path / "out")
    assert [json.loads(line) for line in files["rows.jsonl"].splitlines()] == made.journal.rows
    page = files["report.md"]
    assert "# Measurements on A device" in page
    assert "geometric mean 1.50" in page
    assert "| good | 2 / 1 / 2.0 |  | 3 / 1 / 2.0 | 2 / 1 / 2.0 | 1.50 |" in page
    assert "- speed, refused: ValueError: no" in page
    assert "models: failed: no list" in capsys.readouterr().out


def test_silence_ends_the_worker_and_not_the_run(modules):
    """The process is replaced."""
    worker = modules[0].Worker([sys.executable, "-c", FAKE])
    assert worker.ask("speed good", LONG)["ratio"] == 1.5
    assert worker.ask("speed silent", 0.01) == {
        "error": "no answer within 0.01 seconds",
        "is_late": True,
    }
    assert worker.ask("speed good", LONG)["ratio"] == 1.5
    worker.close()


def test_a_second_call_continues_the_first(suite, monkeypatch):
    """Rows that are there are not measured again; a part that has ended is not begun again."""
    first = suite()
    monkeypatch.setattr(first, "left", lambda: 100.0 if len(first.journal.rows) < 3 else 0.0)
    assert first.run(["speed", "facts"]) == 3
    assert first.journal.of_part("speed")[-1]["state"] == "unfinished"
    second = suite()
    assert second.run(["speed", "facts"]) == 1
    rows = [row["task"] for row in second.journal.rows if row["part"] == "speed"]
    assert rows == ["good", "refused", "part", "ended", "unreadable", "lost", "again", "part"]
    before = len(second.journal.rows)
    assert suite().run(["speed", "facts"]) == 1
    assert len(second.journal.rows) == before


def test_a_row_that_the_end_of_a_call_cuts_short_is_measured_again(suite, modules, monkeypatch):
    """And fails only if it takes longer than a row may."""
    monkeypatch.setattr(modules[2], "NO_TIME", 0.0)
    first = suite()
    monkeypatch.setattr(first, "left", lambda: 0.05)
    assert first.run(["smoke"]) == 3
    assert [row["task"] for row in first.journal.of_part("smoke")] == ["part"]
    second = suite()
    second._task_seconds = 0.05
    assert second.run(["smoke"]) == 1
    rows = {row["task"]: row for row in second.journal.of_part("smoke")}
    assert rows["silent"]["error"] == "no answer within 0.05 seconds"
    assert rows["part"]["state"] == "1 of 1 rows failed"


def test_a_line_that_was_cut_loses_no_other(modules, tmp_path):
    path = tmp_path / "rows.jsonl"
    journal = modules[0].Journal(path)
    journal.append({"part": "speed", "task": "a"})
    with path.open("a") as file:
        file.write('{"part": "speed", "ta')
    cut = modules[0].Journal(path)
    assert [row["task"] for row in cut.rows] == ["a"]
    cut.append({"part": "speed", "task": "b"})
    assert [row["task"] for row in modules[0].Journal(path).rows] == ["a", "b"]


def command(modules, code, **words):
    return modules[2].Command([sys.executable, "-c", code], **{"needs": 50.0, **words})


def test_a_command_that_fails_keeps_no_other_from_running(suite, modules, tmp_path):
    commands = {
        "bad": command(modules, "print('tried'); raise SystemExit(3)"),
        "good": command(modules, "import os; print('rows in', os.environ['SUITE_ROWS'])"),
    }
    made = suite(commands)
    assert made.run(["bad", "good"]) == 1
    states = [made.journal.of_part(part)[0]["state"] for part in ("bad", "good")]
    assert states == ["failed with status 3", "complete"]
    files = read_archive(tmp_path / "out")
    assert files["bad.log"] == "tried\n"
    assert files["good.log"].endswith("good.jsonl\n")


class LatePopen(subprocess.Popen):
    """A command whose time is over when it has written something."""

    def __init__(self, *words, stdout, **settings):
        self._log, self._is_late = Path(stdout.name), False
        super().__init__(*words, stdout=stdout, **settings)

    def wait(self, timeout=None):
        if timeout is None or self._is_late:
            return super().wait(timeout)
        self._is_late = True
        while not self._log.stat().st_size:
            time.sleep(0.01)
        raise subprocess.TimeoutExpired(self.args, timeout)


def test_a_command_that_takes_too_long_is_interrupted_and_may_continue(
    suite, modules, monkeypatch, tmp_path
):
    """Nothing of it survives, and a later call goes on if the command can."""
    code = "import time; print('begun', flush=True); time.sleep(600)"
    commands = {
        "tests": command(modules, code, continues=True),
        "paper": command(modules, code),
    }
    seconds = modules[2].NO_TIME + LONG
    with monkeypatch.context() as patch:
        patch.setattr(modules[2], "subprocess", SimpleNamespace(**vars(subprocess)))
        patch.setattr(modules[2].subprocess, "Popen", LatePopen)
        made = suite(commands, seconds=seconds)
        assert made.run(["tests"]) == 3
        assert made.journal.of_part("tests")[0]["state"] == "unfinished"
        alone = suite(commands, seconds=seconds)
        assert alone.run(["paper"]) == 1
        assert alone.journal.of_part("paper")[0]["state"].startswith("ended after ")
    late = suite(commands, seconds=modules[2].NO_TIME + 3)
    assert late.run(["speed", "tests"]) == 3  # as the second part it needs more time
    assert read_archive(tmp_path / "out")["tests.log"].startswith("begun\n")


def test_tests_are_rows_and_run_once(tmp_path):
    """The plugin writes each result at once, and leaves out what has one."""
    script = tmp_path / "test_some.py"
    script.write_text(
        "import pytest\n"
        "def test_one(record_property): record_property('distinct_outputs', 4)\n"
        "def test_two(): assert False, 'no'\n"
        "@pytest.mark.skip(reason='no device')\n"
        "def test_three(): pass\n"
    )
    rows = tmp_path / "rows.jsonl"

    def run():
        return subprocess.run(
            [
                *(sys.executable, "-m", "pytest", "-q", "-p", "pytest_rows"),
                *("-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", tmp_path, script),
            ],
            env={
                **os.environ,
                "PYTHONPATH": str(FOLDER),
                "SUITE_ROWS": str(rows),
                "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            },
            capture_output=True,
            check=False,
            timeout=240,
        ).returncode

    assert run() == 1
    one, two, three = [json.loads(line) for line in rows.read_text().splitlines()]
    assert (one["outcome"], one["distinct_outputs"]) == ("passed", 4)
    assert "assert False" in two["error"]
    assert three["outcome"] == "skipped"
    assert run() == 0
    assert len(rows.read_text().splitlines()) == 3


def test_the_rows_of_the_paper_outlive_an_interruption(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(FOLDER))
    paper = importlib.import_module("paper_ops")
    measured = []

    def measure(row, *_):
        measured.append(row.op)
        if len(measured) == 2:
            raise KeyboardInterrupt
        return {"op": row.op, "shape": row.shape}

    rows = [SimpleNamespace(op=name, shape="(3,)") for name in ("a", "b", "c")]
    monkeypatch.setattr(paper, "list_rows", lambda: rows)
    monkeypatch.setattr(paper, "measure", measure)
    monkeypatch.setattr(paper, "render", lambda result: f"{len(result['rows'])} rows")
    arguments = ["paper_ops.py", "--output", str(tmp_path), "--runs"]
    monkeypatch.setattr(sys, "argv", [*arguments, "5"])
    with pytest.raises(KeyboardInterrupt):
        paper.main()
    paper.main()
    assert measured == ["a", "b", "b", "c"]
    assert (tmp_path / "paper-ops-cpu.md").read_text() == "3 rows\n"
    monkeypatch.setattr(sys, "argv", [*arguments, "6"])  # rows of other runs are not continued
    paper.main()
    assert measured[4:] == ["a", "b", "c"]


def run_suite(folder, *arguments, python):
    return subprocess.run(
        ["bash", FOLDER / "gpu_suite.sh", folder, *arguments],
        env={**os.environ, "PYTHON": str(python), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_the_suite_needs_a_device(tmp_path, forking_python):
    """It says so, and runs nothing."""
    done = run_suite(tmp_path / "out", python=forking_python)
    assert done.returncode == 2
    assert "finds no torch with a CUDA device (set PYTHON to another one" in done.stderr
    assert done.stdout == ""


def test_rows_are_measured_on_a_cpu(tmp_path, forking_python):
    """One op through the real worker, with graphs built under the flag."""
    parts = ["start", "smoke", "scans", "steps", "facts", "determinism", "speed"]
    parts += ["digest", "graphs"]
    words = (*parts, "--dry-run", "--only", "adaptive_max_pool3d")
    done = run_suite(tmp_path / "out", *words, python=forking_python)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    journal = (tmp_path / "out" / "rows.jsonl").read_text().splitlines()
    rows = {(row["part"], row["task"]): row for row in map(json.loads, journal)}
    name = "adaptive_max_pool3d_backward, 9 to 29"
    assert rows["smoke", name]["difference"] < 1e-5
    assert {row["verdict"] for row in rows.values() if "verdict" in row} == {"ok", "unsupported"}
    assert rows["scans", "cumprod"]["patched_outputs"] == 1
    assert rows["steps", "Digits"]["callback"]["waits"] == [0, 0]
    assert all(rows[part, "part"]["host_mb"] > 0 < rows[part, "part"]["seconds"] for part in parts)
    assert rows["smoke", "forward"]["nodes"]["bilinear"] == "UpsampleBilinear2DBackward0"
    for dtype in ("float32", "bfloat16"):
        assert rows["determinism", f"{name} | {dtype}"]["patched_outputs"] == 1
        assert rows["speed", f"{name} | {dtype}"]["ratio"] > 0
    assert rows["graphs", name]["unsupported"] == "a CPU has no CUDA graphs"
    assert rows["graphs", "torch.compile, reduce-overhead"]["outputs"] == 1
    assert rows["facts", "stack"]["stack"]["device.kind"] == "cpu"
    assert [rows[part, "part"]["state"] for part in parts] == ["complete"] * 9


@pytest.fixture
def worker(monkeypatch):
    """Return the modules of the worker: they run here, so that a failure can be planted."""
    monkeypatch.syspath_prepend(str(FOLDER))
    names = ("suite_worker", "suite_rows", "suite_first", "suite_measures")
    yield [importlib.import_module(name) for name in names]
    for name in names:
        del sys.modules[name]


def plant(change):
    """Return a workload whose result is changed under the settings of a session."""
    from patch_workloads import Workload

    values = torch.linspace(-1, 1, 50)

    def call():
        return change(values) if torch.are_deterministic_algorithms_enabled() else values

    return Workload("index_add", "planted", lambda _: call)


def warn(values):
    warnings.warn("The Triton kernel a:b cannot be used", stacklevel=1)
    return values


PLANTED = {
    "nothing": (lambda values: values * (1 + 1e-6), None),
    "a gradient 1.5 times too large": (lambda values: values * 1.5, "by more than the bound"),
    "one wrong value": (lambda values: values.index_fill(0, torch.tensor(3), 0.5), "bound"),
    "NaN": (lambda values: values.index_fill(0, torch.tensor(3), torch.nan), "bound"),
    "a layout": (lambda values: values.repeat_interleave(2)[::2], "(50,) (2,)'] in place of"),
    "two outputs": (lambda values: values + 1e-7 * torch.rand(()), "two calls gave two outputs"),
    "a warning": (warn, "warning: The Triton kernel a:b cannot be used"),
    "an error": (lambda _: 1 / 0, "ZeroDivisionError: division by zero"),
}


@pytest.mark.parametrize(("change", "error"), PLANTED.values(), ids=PLANTED)
def test_a_smoke_row_is_judged(worker, monkeypatch, change, error):
    answering, rows, _, measures = worker
    monkeypatch.setattr(rows, "find_workload", lambda _: plant(change))
    row = answering.answer("smoke index_add, planted", measures.Settings("cpu", "1", "2", ""))
    assert row["verdict"] == ("ok" if error is None else "failed")
    assert (error or "") in row.get("error", "")
    assert row["host_mb"] > 0


def test_a_device_scans_and_waits_are_judged(worker, monkeypatch):
    """The other parts of the suite's begin, each with a failure that is planted."""
    answering, _, first, measures = worker
    settings = measures.Settings("cpu", "1", "2", "")
    monkeypatch.setattr(device, "digest_many", lambda tensors: [object()])
    monkeypatch.setitem(first.SCANS, "cumprod", torch.rand_like)
    waits = {False: 3, True: 1}  # without and with the callback, each plus some in every batch
    monkeypatch.setattr(
        first, "fit", lambda *words, callback: ({"step_ms": 1.0}, waits[callback] * words[1])
    )
    assert "digests on the device differ" in answering.answer("start -", settings)["error"]
    assert answering.answer("scans cumprod", settings)["error"] == "20 outputs for one input"
    assert answering.answer("steps Digits", settings)["verdict"] == "ok"
    waits[True] = 4
    assert "the callback waits in batches" in answering.answer("steps Digits", settings)["error"]


def test_sums_over_two_processes_are_rows(tmp_path, forking_python):
    """By Gloo; a machine with one device says so."""
    script = [forking_python, FOLDER / "several_gpus.py", "--calls", "2", "-o", tmp_path]
    more = ["--device", "cpu", "--no-trainings"]
    done = subprocess.run([*script, *more], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    facts, *rows = map(json.loads, (tmp_path / "several-gpus.jsonl").read_text().splitlines())
    assert facts["ranks"] == 2
    assert len(rows) == 4
    assert all((row["outputs"], row["equal_ranks"]) == (1, True) for row in rows)


def test_an_unknown_part_is_refused(tmp_path, forking_python):
    done = run_suite(tmp_path / "out", "pathces", "--dry-run", python=forking_python)
    assert done.returncode == 2
    assert "no such part: pathces; the parts are start, smoke, scans, steps, facts, " in done.stderr


def test_every_file_that_the_suite_runs_is_there(modules):
    """No part can fail on a CUDA machine for a name that nobody tried."""
    script = (FOLDER / "gpu_suite.py").read_text()
    files = set(re.findall(r"\b(?:benchmarks|tests|examples)/[\w/]+\.py", script))
    assert len(files) == 8
    for file in files:
        assert (FOLDER.parent / file).is_file(), file
    marked = {path for path in FOLDER.parent.glob("tests/**/test_*.py") if MARK in path.read_text()}
    built = {path for path in marked if f"{MARK}_build" in path.read_text()}
    assert {str(path.relative_to(FOLDER.parent)) for path in marked - built} <= files


def test_the_tests_for_a_device_are_collected(modules, tmp_path, forking_python, monkeypatch):
    """Without the project's settings, as on a CUDA machine."""
    monkeypatch.setattr(sys, "executable", forking_python)
    words = modules[2].list_commands(tmp_path, dry=True, limit=60)["tests"].words
    path = tmp_path / "tests.log"
    with path.open("wb") as log:
        arguments = ([*words, "--collect-only"], log, LONG, tmp_path / "rows.jsonl")
        assert modules[2].run_limited(*arguments) == 0, path.read_text()
    assert path.read_text().count("<Module ") == len(modules[2].CUDA_TESTS)


@pytest.mark.cuda_build
@pytest.mark.timeout(3000)
def test_every_part_of_a_dry_run_is_reported(tmp_path):
    """In calls that continue each other, on a CUDA build of torch without a device."""
    for _ in range(20):
        done = run_suite(
            *(tmp_path / "out", "--dry-run", "--only", "adaptive_max_pool3d", "--seconds", "240"),
            python=sys.executable,
        )
        if done.returncode != 3:
            break
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    page = (tmp_path / "out" / "report.md").read_text()
    assert page.count("| complete |") == 17
    assert set(read_archive(tmp_path / "out")) >= {"rows.jsonl", "tests.jsonl", "report.md"}
