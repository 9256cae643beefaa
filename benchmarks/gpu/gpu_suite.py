"""All measurements and tests for a CUDA machine: ``bash gpu_suite.sh FOLDER [PART...]``.

A call runs the parts in their order, what decides first, and ends within SECONDS. The next call
with the same folder, or with its ``rows.jsonl`` on another machine, continues where it ended until
every part has ended; then the exit status is 0, or 1 if something failed. It is 3 if another call
is needed, and 2 if this Python lacks a package: nothing is run then. Packages in a folder
``vendor`` of the repository are found; ``pip install --no-deps --target vendor msgspec`` makes one.

FOLDER receives few files: ``rows.jsonl``, to which each row is appended when it is measured,
``report.md``, and after each part ``results.tgz``, which has the logs, too. Whatever interrupts a
call, what was measured before is kept.

``--dry-run`` runs every part on the CPU with few calls, which shows only that it runs.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.util import find_spec
from pathlib import Path

from suite_client import Journal, Row, Worker, lacks
from suite_report import render

HERE = Path(__file__).resolve().parent
BENCHMARKS = HERE.parent
ROOT = BENCHMARKS.parent
TESTS = ROOT / "tests"
VENDOR = ROOT / "vendor"
NEEDED = ("triton", "lightning", "pytest")  # beside the dependencies of the package
# The most seconds of each part in a call. Most take far less, and the first call ends among them.
FIRST = {
    "machine": 90, "doctor": 60, "example": 120, "training": 90, "race": 90, "tests": 100,
    "resume": 120, "sizes": 90, "smoke": 90, "scans": 40, "steps": 90, "determinism": 300,
}  # fmt: skip
SECOND = ("speed", "graphs", "digest", "portable", "facts")
COMMANDS = ("probes", "audit")
PARTS = (*FIRST, *SECOND, *COMMANDS)
APART = ("sizes",)  # each task in its own process
CUDA_TESTS = ("tests/hashing/test_cuda.py", "tests/lightning/test_probes_cuda.py")
NO_TIME = 20.0  # seconds; with less left, nothing is started
TASK_SECONDS = 90.0
CONTINUED = 3  # the exit status of a call after which another one is needed
MOST_BYTES = 2**22  # of a file in the archive
MOST_LATE = 3  # calls in which a command that continues may be cut off


@dataclass(frozen=True)
class Command:
    """A part that is a command.

    Attributes:
        words: The command.
        needs: Seconds that must be left to start it, unless it is the first part of a call.
        continues: Whether a second run continues the first one.
    """

    words: Sequence[str | Path]
    needs: float
    continues: bool = False


def list_commands(work: Path, *, dry: bool) -> dict[str, Command]:
    """Return the parts that are commands; they write into a folder of their own."""
    python = sys.executable
    d9m = (python, "-m", "lightning_d9m")
    device = "cpu" if dry else "cuda"
    example = ["--accelerator", "cpu", "--epochs", "1", "--scenes", "32"]
    probes = ["--kinds", "Digits", "--variants", "module probes", "--rounds", "1"]
    audit = ["--quick", "-n", "2", "--ops", "index_add"]
    # Without the project's settings and fixtures, which need plugins and hypothesis.
    tests = (
        "-c",
        os.devnull,
        "--rootdir",
        ROOT,
        "--import-mode=importlib",
        "-m",
        "cuda",
        "-v",
        "--noconftest",
    )
    plugins = ("-p", "no:cacheprovider", "-p", "no:randomly", "-p", "pytest_rows")
    markers = ("-o", "markers=cuda: needs a CUDA device")

    def script(name: str, *words: str | Path, small: Sequence[str] = ()) -> tuple[str | Path, ...]:
        return (
            python,
            f"benchmarks/{name}.py",
            "--device",
            device,
            *words,
            *(small if dry else ()),
        )

    return {
        "doctor": Command([*d9m, "doctor", "--json"], 30),
        "example": Command(
            [
                *(*d9m, "repeat", "-n", "2", "-o", work / "segmentation", "--json", "--"),
                *(python, "examples/segmentation.py"),
                *(example if dry else ["--accelerator", "gpu"]),
            ],
            needs=60,
        ),
        **list_trainings(work, dry=dry),
        "tests": Command(
            [python, "-m", "pytest", *tests, *markers, *plugins, *CUDA_TESTS], 30, True
        ),
        "probes": Command(script("cost/probes", "-o", work / "probes.json", small=probes), 300),
        "audit": Command(
            [
                *(*d9m, "audit", "ops", "--device", device, "-o", work / "audit"),
                *(audit if dry else ["--runs", "30"]),
            ],
            needs=60,
            continues=True,
        ),
    }


def list_trainings(work: Path, *, dry: bool) -> dict[str, Command]:
    """Return trainings of the examples on the device."""
    where, differs = ("--accelerator cpu", 0) if dry else ("--accelerator gpu", 1)
    d9m = f"{sys.executable} -m lightning_d9m"
    digits = f"{sys.executable} examples/digits.py --epochs 1"
    scenes = f"{sys.executable} examples/segmentation.py --epochs 1 --scenes 64"
    portable = "export LIGHTNING_D9M_PORTABLE=1; LIGHTNING_D9M_LEDGER_DIR"
    return {
        # One digest on the CPU and on the device.
        "training": shell(
            f"{portable}={work}/cpu {digits}",
            f"{portable}={work}/device {digits} {where}",
            f"{d9m} compare {work}/cpu {work}/device",
        ),
        # Gradients that race without the settings: the runs differ, and the command finds where.
        "race": shell(
            f"{d9m} locate --no-determinism -o {work}/race -- {scenes} {where}; test $? = {differs}"
        ),
        "resume": shell(f"{d9m} repeat --interrupt -o {work}/resume -- {digits} {where}"),
    }


def shell(*commands: str) -> Command:
    """Return a part that ends with the first of some commands of the shell that fails."""
    return Command(["bash", "-c", " && ".join(commands)], needs=60)


class Suite:
    """A call of the suite.

    Args:
        folder: Where the results are.
        work: The folder of logs, and of what commands write.
        worker: Measures rows.
        commands: The parts that are commands.
        seconds: The time of the call.
        about: What the report says about the call.
        clock: Returns seconds.
        run: Runs a command; see :func:`run_limited`.
    """

    def __init__(
        self,
        folder: Path,
        work: Path,
        worker: Worker,
        commands: Mapping[str, Command],
        *,
        seconds: float,
        about: Row | None = None,
        clock: Callable[[], float] = time.monotonic,
        run: Callable[..., int | None] | None = None,
    ) -> None:
        self._folder, self._work, self._worker, self._commands = folder, work, worker, commands
        self._clock, self._run_command_line = clock, run or run_limited
        self._begin, self._seconds, self._about = clock(), seconds, about or {}
        self._rows = folder / "rows.jsonl"
        self.journal = Journal(self._rows)

    def left(self) -> float:
        """Return the seconds that are left."""
        return self._seconds - (self._clock() - self._begin)

    def run(self, parts: Sequence[str]) -> int:
        """Run what is left of the parts; return the exit status."""
        is_first = True
        for part in parts:
            if self._has_ended(part):
                continue
            print(f"== {part}", flush=True)
            limit = min(self.left() - NO_TIME, FIRST.get(part, self._seconds))
            try:
                if part in self._commands:
                    self._run_command(part, self._commands[part], limit, is_first=is_first)
                else:
                    self._run_rows(part, self._clock() + limit)
            finally:
                self.pack()
            is_first = False
        for part in parts:
            print(f"{part}: {self.journal.find_end(part)['state']}", flush=True)
        if not all(map(self._has_ended, parts)):
            print("Call it again to continue.", flush=True)
            return CONTINUED
        return int(any(self.journal.find_end(part)["state"] != "complete" for part in parts))

    def pack(self) -> None:
        """Write the report, and the archive of all files."""
        page = render(self.journal, PARTS)
        (self._folder / "report.md").write_text(page, encoding="utf-8")
        archive = self._folder / "results.tgz"
        new = self._work / "results.new"
        with tarfile.open(new, "w:gz") as file:
            for folder in (self._folder, self._work):
                for path in sorted(folder.rglob("*")):
                    is_small = path.is_file() and path.stat().st_size <= MOST_BYTES
                    if is_small and path not in {archive, new}:
                        file.add(path, path.relative_to(folder))
        archive.write_bytes(new.read_bytes())

    def _run_rows(self, part: str, end: float) -> None:
        done = {row["task"] for row in self.journal.of_part(part) if not lacks(row)}
        known = self._worker.ask(f"list {part}", end - self._clock()) if end > self._clock() else {}
        if known.get("is_late") or not known:
            self._note_unfinished(part)
            return
        if "error" in known:
            self._end(part, f"failed: {known['error']}", missing=lacks(known))
            return
        self._greet()
        for task in known["tasks"]:
            if task in done:
                continue
            if part in APART:
                self._worker.close()
            begin = self._clock()
            limit = min(end - begin, TASK_SECONDS)
            if limit <= 0:
                self._note_unfinished(part)
                return
            row = self._worker.ask(f"{part} {task}", limit)
            # What only the end of the time has cut short is measured again in the next call.
            most = min(TASK_SECONDS, FIRST.get(part, TASK_SECONDS), self._seconds)
            if row.pop("is_late", False) and limit < most / 2:
                self._note_unfinished(part)
                return
            seconds = round(self._clock() - begin, 2)
            self._append({"part": part, "task": task, **row, "seconds": seconds})
        rows = self.journal.of_tasks(part)
        failed = sum("error" in row for row in rows)
        state = f"{failed} of {len(rows)} rows failed" if failed else "complete"
        seconds = round(sum(row["seconds"] for row in rows), 2)
        self._end(part, state, missing=any(map(lacks, rows)), seconds=seconds)

    def _run_command(self, part: str, command: Command, limit: float, *, is_first: bool) -> None:
        if limit < (0 if is_first else command.needs):
            self._note_unfinished(part)
            return
        begin, path = self._clock(), self._work / f"{part}.log"
        with path.open("ab") as log:
            known = log.tell()  # of earlier calls, whose errors are not this one's
            status = self._run_command_line(command.words, log, limit, self._rows)
        self.journal = Journal(self._rows)  # tests write their rows themselves
        tail = path.read_bytes()[known:].decode(errors="replace")[-4000:]
        print("\n".join(tail.splitlines()[-20:]), flush=True)
        found: Row = {"seconds": round(self._clock() - begin, 2)}
        # A case that ends the process has its row, and the next call continues after it.
        is_cut = status is None or status < 0
        if is_cut and command.continues and self._count_late(part) < MOST_LATE:
            self._note_unfinished(part, late=True)
        elif status == 0:
            self._end(part, "complete", said=tail, **found)
        else:
            state = f"ended after {limit:.0f} s" if status is None else f"status {status}"
            self._end(part, f"failed: {state}", missing=lacks({"said": tail}), said=tail, **found)

    def _greet(self) -> None:
        if not any(row["part"] == "suite" for row in self.journal.rows):
            date = datetime.now(timezone.utc).strftime("%Y-%m-%d")
            row = {"part": "suite", "task": "-", "date": date}
            self._append({**row, **self._about, **self._worker.greeting})

    def _append(self, row: Row) -> None:
        self.journal.append(row)
        print(json.dumps({**row, "said": ""})[:2000], flush=True)

    def _end(self, part: str, state: str, *, missing: bool = False, **more: object) -> None:
        """Note the end of a part; one that lacks a package has not ended."""
        ended = {"ended": not missing, "state": state}
        self._append({"part": part, "task": "part", **ended, **more})

    def _note_unfinished(self, part: str, *, late: bool = False) -> None:
        row = {"part": part, "task": "part", "ended": False, "state": "unfinished"}
        self._append({**row, **({"late": True} if late else {})})

    def _count_late(self, part: str) -> int:
        return sum(row["part"] == part and row.get("late", False) for row in self.journal.rows)

    def _has_ended(self, part: str) -> bool:
        return bool(self.journal.find_end(part)["ended"])


def run_limited(words: Sequence[str | Path], log: object, limit: float, rows: Path) -> int | None:
    """Run a command; return its exit status, or None if it was interrupted at its time limit."""
    variables = {
        "PYTHONUNBUFFERED": "1",  # an interrupted part has a log
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "SUITE_ROWS": str(rows),
    }
    process = subprocess.Popen(
        [str(word) for word in words],
        stdout=log,
        stderr=subprocess.STDOUT,
        cwd=ROOT,
        env={**os.environ, **make_environment(), **variables},
        start_new_session=True,
    )
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        return None
    finally:
        _end_group(process)


def make_environment() -> dict[str, str]:
    """Return the variables of everything that the suite starts."""
    digits = None if find_spec("sklearn") else HERE / "stand_ins"
    scripts = [HERE, BENCHMARKS / "ops", BENCHMARKS / "cost"]
    tests = [TESTS, TESTS / "support"]
    paths = [ROOT, digits, *tests, *scripts, VENDOR, os.environ.get("PYTHONPATH", "")]
    return {
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(str(path) for path in paths if path)),
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # products beside a second stream
    }


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """End a command and what it started: first by an interruption, which lets it write."""
    for number, seconds in ((signal.SIGINT, 10.0), (signal.SIGKILL, 5.0)):
        try:
            os.killpg(process.pid, number)
            process.wait(seconds)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


@contextmanager
def ended_by_exception() -> Iterator[None]:
    """Let SIGTERM raise, so that commands are ended and the archive is written."""

    def end(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def find_problem(*, dry: bool) -> str:
    """Return why nothing can be run with this Python, in a sentence; empty if it can."""
    sys.path.insert(0, str(VENDOR))
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    listed = re.search(r"(?s)^dependencies = \[(.*?)^\]", text, re.MULTILINE)[1]
    needed = [*re.findall(r'^ *"([\w-]+)', listed, re.MULTILINE), *NEEDED]
    if dry:
        needed.remove("triton")
    if missing := [name for name in needed if find_spec(name.replace("-", "_")) is None]:
        return (
            f"{sys.executable} has no {', '.join(missing)}: run `pip install --no-deps --target "
            f"vendor {' '.join(missing)}` in the repository, with a Python of this version and a "
            "network, and bring the folder along."
        )
    code = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    if not dry and subprocess.run([sys.executable, "-c", code], check=False).returncode:
        return (
            f"{sys.executable} finds no torch with a CUDA device: set PYTHON to another one, or "
            "pass --dry-run."
        )
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("parts", nargs="*", help="all, in their order")
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, with few calls")
    parser.add_argument("--seconds", type=float, default=565, help="time of this call")
    parser.add_argument("--rounds", type=int, help="number of timed calls (20)")
    parser.add_argument("--calls", type=int, help="number of compared calls (30)")
    parser.add_argument("--only", default="", help="only ops with this in their name")
    words = parser.parse_intermixed_args()
    if unknown := [part for part in words.parts if part not in PARTS]:
        parser.error(f"no such part: {', '.join(unknown)}; the parts are {', '.join(PARTS)}")
    begin = time.monotonic()
    if problem := find_problem(dry=words.dry_run):
        print(f"gpu_suite: {problem}", file=sys.stderr)
        sys.exit(2)
    folder = words.folder.resolve()
    work = folder.with_name(f"{folder.name}-work")
    for path in (folder, work):
        path.mkdir(parents=True, exist_ok=True)
    rounds = words.rounds or (1 if words.dry_run else 20)
    calls = words.calls or (2 if words.dry_run else 30)
    os.environ.update(make_environment())
    device = "cpu" if words.dry_run else "cuda"
    script = str(HERE / "suite_worker.py")
    worker = Worker([sys.executable, script, device, str(rounds), str(calls), words.only])
    suite = Suite(
        *(folder, work, worker, list_commands(work, dry=words.dry_run)),
        seconds=words.seconds - (time.monotonic() - begin),
        about={"rounds": rounds, "calls": calls, "dry": words.dry_run},
    )
    with ended_by_exception():
        try:
            status = suite.run(words.parts or PARTS)
        finally:
            worker.close()
    sys.exit(status)


if __name__ == "__main__":
    main()
