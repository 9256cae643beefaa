"""The suite for a CUDA machine: a failure is a row, and nothing that was measured is lost."""

import importlib
import json
import os
import shlex
import sys
import tarfile
import warnings
from pathlib import Path

import pytest
import torch
from scripts import execute

FOLDER = Path(__file__).parents[1] / "benchmarks"
SCRIPTS = [FOLDER / name for name in ("gpu", "cost")]
MARK = "pytest.mark." + "cuda"
LONG = 300.0  # seconds, of which none is waited for
FAKE = """
import os, sys, time
from pathlib import Path
import suite_journal
time_of = lambda us: {"device_us": us, "host_us": 1.0, "peak_mb": 2.0}
def measure(task):
    if task == "refused": return {"error": "ValueError: no"}
    if task == "lost": return {"error": "RuntimeError: CUDA error", "fatal": True}
    if task == "ended": sys.exit(7)
    if task == "hangs": time.sleep(100)
    return {"op": task, "status": "patched", "original": time_of(2.0), "patched": time_of(3.0),
            "patched_fill_off": time_of(2.5), "ratio": 1.5, "pid": os.getpid()}
suite_journal.TASK_SECONDS = 1
journal = suite_journal.Journal(Path(os.environ["SUITE_ROWS"]))
if not journal.rows:
    journal.append({"part": "suite", "task": "-", "device": "A device", "torch": "2.13"})
tasks = ["good", "refused", "ended", "hangs", "lost", "again"]
suite_journal.run_tasks(journal, "speed", tasks, measure)
"""


@pytest.fixture
def modules(monkeypatch):
    """Return the scripts of the suite, which import each other by name.

    Those of the worker run here, so that a failure can be planted.
    """
    for folder in SCRIPTS:
        monkeypatch.syspath_prepend(str(folder))
    names = [f"suite_{name}" for name in ("journal", "worker", "rows", "device", "measures")]
    yield {name: importlib.import_module(name) for name in [*names, "suite_report", "gpu_suite"]}
    for name in [*names, "suite_report", "gpu_suite"]:
        del sys.modules[name]


def read_archive(folder):
    with tarfile.open(folder / "results.tgz") as archive:
        return {member.name: archive.extractfile(member).read().decode() for member in archive}


def make_suite(modules, folder, commands, **more):
    """Return a call of the suite whose results are in a folder."""
    for path in (folder / "out", folder / "work"):
        path.mkdir(exist_ok=True)
    return modules["gpu_suite"].Suite(folder / "out", folder / "work", commands, **more)


def test_every_failure_is_a_row(modules, tmp_path, capsys):
    """And the rows after it are measured by a new process; the report and the archive have all."""
    command = modules["gpu_suite"].Command
    line = shlex.join([sys.executable, "-c", FAKE])
    commands = {"speed": command(line, 10, continues=True), "graphs": command("exit 4", 10, True)}
    made = make_suite(modules, tmp_path, commands, seconds=LONG)
    assert made.run(["speed", "graphs"]) == 1
    rows = {row["task"]: row for row in made.journal.of_part("speed")}
    errors = [row.get("error") for row in rows.values()]
    assert errors[:2] == [None, "ValueError: no"]
    assert errors[2] == errors[3] == "2 processes ended while they ran it, or after 1 seconds"
    assert errors[4:] == ["RuntimeError: CUDA error", None, None]
    assert rows["good"]["pid"] != rows["again"]["pid"]
    assert rows["part"]["state"] == "4 of 6 rows failed"
    assert made.journal.of_part("graphs")[0]["state"] == "failed: status 4"
    files = read_archive(tmp_path / "out")
    written = [json.loads(line) for line in files["rows.jsonl"].splitlines()]
    assert [row for row in written if "begun" not in row] == made.journal.rows
    page = files["report.md"]
    assert "# Measurements on A device" in page
    assert "geometric mean 1.50" in page
    assert "| good | 2 / 1 / 2.0 |  | 3 / 1 / 2.0 | 2 / 1 / 2.0 | 1.50 |" in page
    assert page.index("- speed, refused: ValueError: no") < page.index("## Shown")
    assert "graphs: failed: status 4" in capsys.readouterr().out


class Rehearsal:
    """Stands for a machine: its clock advances by what each part would take.

    Args:
        modules: The scripts of the suite.
        broken: The part that hangs, or fails for a package that is missing.
        missing: Whether it does the latter.
    """

    ROWS = 2
    error = "ModuleNotFoundError: No module named 'x'"

    def __init__(self, modules, broken, *, missing):
        self.now, self.broken, self.missing, self.ran = 0.0, broken, missing, []
        self.journal, self.rows_of = modules["suite_journal"], modules["suite_worker"].PARTS

    def take(self, part, seconds, limit):
        """Advance the clock; return the error, if there is one, or None if the time is over."""
        self.ran.append(part)
        hangs = part == self.broken and not self.missing
        self.now += limit if hangs else min(seconds, limit)
        if hangs or seconds > limit:
            return None
        return self.error if part == self.broken else ""

    def measure(self, part, end, rows):
        """Stand for a process that measures rows until the clock has come to an end."""
        journal = self.journal.Journal(rows)
        for number in range(self.ROWS):
            task = f"task {number}"
            if journal.has_ended(part, task):
                continue
            journal.begin(part, task)
            limit = min(end - self.now, self.journal.TASK_SECONDS)
            error = self.take(part, 8, limit)
            if error is None:
                return 1 if end > self.now else None
            row = {"part": part, "task": task, "seconds": 8}
            journal.append({**row, **({"error": error} if error else {})})
        return 0

    def run(self, _, log, limit, rows):
        part = Path(log.name).stem
        if part in self.rows_of:
            return self.measure(part, self.now + limit, rows)
        error = self.take(part, 30, limit)
        self.now += 15 if error is None else 0  # to end it
        log.write(f"Traceback of {part}: {error or 'it hangs'}\n".encode())
        return None if error is None else int(bool(error))


@pytest.mark.parametrize("missing", [False, True])
def test_a_rehearsal_ends_in_time_whatever_fails(modules, tmp_path, monkeypatch, missing):
    """Each part in turn: calls end within 590 s, go on with the others, and come to an end."""
    suite = modules["gpu_suite"]
    monkeypatch.setattr(os, "fsync", lambda _: None)
    for broken in suite.PARTS:
        folder, machine = tmp_path / broken, Rehearsal(modules, broken, missing=missing)
        folder.mkdir()
        commands = suite.list_commands(folder / "work", dry=False)
        first, ended = len(suite.FIRST), []
        for call in range(8):
            begin = machine.now
            if call == 2:  # another machine, which has the package
                machine.broken = broken if not missing else ""
            made = make_suite(
                modules, folder, commands,
                seconds=565, clock=lambda own=machine: own.now, run=machine.run,
            )  # fmt: skip
            status = made.run(suite.PARTS)
            assert machine.now - begin <= 590
            ended.append(sum(made._has_ended(part) for part in suite.PARTS))
            page = (folder / "out" / "report.md").read_text()
            assert "None" not in page
            if status != suite.CONTINUED:
                break
        assert status == int(not missing), (broken, ended)
        assert ended[0] >= first - 1
        assert ended[-1] == len(suite.PARTS)
        files = [path for path in (folder / "out").iterdir() if path.is_file()]
        assert len(files) <= 8
        assert max(path.stat().st_size for path in files) < 2**24
        is_named = page.index(f"- {broken}") < page.index("## Shown") if not missing else True
        assert is_named, page
        if missing:
            assert machine.ran.count(broken) > Rehearsal.ROWS * (broken in machine.rows_of)


def test_a_second_failure_is_not_taken_for_the_first_one(modules, tmp_path):
    """The log has the error of the first call, too: there the package was missing."""
    suite, machine = modules["gpu_suite"], Rehearsal(modules, "doctor", missing=True)
    commands = suite.list_commands(tmp_path, dry=False)
    ended = []
    for error in ("ModuleNotFoundError: No module named 'x'", "RuntimeError: no"):
        machine.error = error
        given = (modules, tmp_path, commands)
        made = make_suite(*given, seconds=LONG, clock=lambda: machine.now, run=machine.run)
        ended.append(made.run(["doctor"]))
    assert ended == [suite.CONTINUED, 1]
    page = (tmp_path / "out" / "report.md").read_text()
    assert "RuntimeError: no" in page
    assert "ModuleNotFoundError" not in page


def test_a_part_that_needs_another_process_at_the_end_of_the_time_is_continued(modules, tmp_path):
    """Each large size has its own process, which ends with the status of a call."""
    suite, now = modules["gpu_suite"], [0.0]

    def run(_, __, limit, rows):
        now[0] += limit
        modules["suite_journal"].Journal(rows).append({"part": "sizes", "task": "one"})
        return suite.CONTINUED

    commands = suite.list_commands(tmp_path, dry=False)
    made = make_suite(modules, tmp_path, commands, seconds=LONG, clock=lambda: now[0], run=run)
    assert made.run(["sizes"]) == suite.CONTINUED
    assert made.journal.find_end("sizes")["state"] == "unfinished"


def test_a_package_that_is_missing_is_said_at_once(modules, tmp_path, monkeypatch, capsys):
    """In one sentence, before anything is run."""
    suite = modules["gpu_suite"]
    monkeypatch.setattr(suite, "find_spec", lambda name: None if name == "msgspec" else name)
    monkeypatch.setattr(sys, "argv", ["gpu_suite", str(tmp_path / "out"), "smoke", "--dry-run"])
    with pytest.raises(SystemExit) as ended:
        suite.main()
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "has no msgspec: run `pip install --no-deps --target vendor msgspec`" in said
    assert not (tmp_path / "out").exists()


def run_suite(folder, *arguments, python):
    command = ("bash", FOLDER / "gpu_suite.sh", folder, *arguments)
    return execute(*command, fails=True, PYTHON=str(python), OMP_NUM_THREADS="1")


def test_rows_are_measured_on_a_cpu(tmp_path, forking_python):
    """One op through the real worker, with graphs built under the flag."""
    parts = ["machine", "sizes", "smoke", "scans", "steps", "determinism", "speed", "graphs"]
    parts += ["digest", "portable"]
    words = (*parts, "--dry-run", "--only", "adaptive_max_pool3d")
    done = run_suite(tmp_path / "out", *words, python=forking_python)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    journal = (tmp_path / "out" / "rows.jsonl").read_text().splitlines()
    rows = {(row["part"], row["task"]): row for row in map(json.loads, journal)}
    name = "adaptive_max_pool3d_backward, side=24, output=32"
    assert rows["smoke", name]["difference"] < 1e-5
    assert {row["verdict"] for row in rows.values() if "verdict" in row} == {"ok", "unsupported"}
    assert rows["scans", "cumprod"]["patched_outputs"] == 1
    assert rows["steps", "Digits"]["callback"]["waits"] == [0, 0]
    assert rows["sizes", "index_add of 2.25e9 elements"]["terms"] == 152 * 128
    assert rows["sizes", "a default device"]["steps"] == 2
    assert rows["portable", "Transformer"]["tensors"] > 20
    seconds = {part: rows[part, "part"]["seconds"] for part in parts}
    assert sum(seconds.values()) > 0  # a part may take less than is shown
    assert rows["smoke", "forward"]["nodes"]["bilinear"] == "UpsampleBilinear2DBackward0"
    for dtype in ("float32", "bfloat16"):
        assert rows["determinism", f"{name} | {dtype}"]["patched_outputs"] == 1
        assert rows["speed", f"{name} | {dtype}"]["ratio"] > 0
    assert rows["graphs", name]["unsupported"] == "a CPU has no CUDA graphs"
    assert rows["graphs", "torch.compile, reduce-overhead"]["outputs"] == 1
    assert rows["machine", "stack"]["stack"]["device.kind"] == "cpu"
    assert [rows[part, "part"]["state"] for part in parts] == ["complete"] * 10


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
def test_a_smoke_row_is_judged(modules, monkeypatch, change, error):
    monkeypatch.setattr(modules["suite_rows"], "find_workload", lambda _: plant(change))
    settings = modules["suite_measures"].Settings("cpu", "1", "2", "")
    row = modules["suite_worker"].answer("smoke", "index_add, planted", settings)
    assert row["verdict"] == ("ok" if error is None else "failed")
    assert (error or "") in row.get("error", "")
    assert row["host_mb"] > 0


def test_every_file_that_the_suite_runs_is_there(modules):
    """No part can fail on a CUDA machine for a name that nobody tried."""
    commands = modules["gpu_suite"].list_commands(FOLDER, dry=False).values()
    files = {word for one in commands for word in shlex.split(one.line) if word.endswith(".py")}
    assert len(files) == 6
    for file in files:
        assert (FOLDER.parent / file).is_file(), file
    marked = {path for path in FOLDER.parent.glob("tests/**/test_*.py") if MARK in path.read_text()}
    built = {path for path in marked if f"{MARK}_build" in path.read_text()}
    assert {str(path.relative_to(FOLDER.parent)) for path in marked - built} <= files


def test_the_tests_for_a_device_are_collected(modules, tmp_path, forking_python, monkeypatch):
    """Without the project's settings, hypothesis and scikit-learn, as on a CUDA machine."""
    monkeypatch.setattr(sys, "executable", forking_python)
    suite = modules["gpu_suite"]
    (tmp_path / "hypothesis.py").write_text("raise ModuleNotFoundError('hypothesis')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(suite, "find_spec", lambda _: None)
    assert "stand_ins" in suite.make_environment()["PYTHONPATH"]
    line = suite.list_commands(tmp_path, dry=True)["tests"].line
    path = tmp_path / "tests.log"
    with path.open("wb") as log:
        arguments = (f"{line} --collect-only", log, LONG, tmp_path / "rows.jsonl")
        assert suite.run_limited(*arguments) == 0, path.read_text()
    assert path.read_text().count("<Module ") == len(suite.CUDA_TESTS)


@pytest.mark.cuda_build
@pytest.mark.timeout(3000)
def test_every_part_of_a_dry_run_is_reported(modules, tmp_path):
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
    assert page.count("| complete |") == len(modules["gpu_suite"].PARTS)
    assert set(read_archive(tmp_path / "out")) >= {"rows.jsonl", "report.md"}
