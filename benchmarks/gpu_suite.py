"""All measurements and tests for a CUDA machine: ``bash gpu_suite.sh FOLDER [PART...]``.

A call runs the parts in their order, the most important evidence first, and ends within SECONDS.
The next call with the same folder continues where it ended, until every part has ended; then the
exit status is 0, or 1 if something failed. It is 3 if another call is needed.

FOLDER receives ``rows.jsonl``, to which each row is appended when it is measured, a log of each
part that is a command, ``report.md``, and after each part ``results.tgz`` with all of them.
Whatever interrupts a call, what was measured before is kept.

``--dry-run`` runs every part on the CPU with few calls, which shows only that it runs.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from suite_client import START_SECONDS, Journal, Row, Worker
from suite_report import render

BENCHMARKS = Path(__file__).resolve().parent
ROOT = BENCHMARKS.parent
# The first four settle in minutes what is most likely to fail.
ROW_PARTS = (
    "start",
    "smoke",
    "scans",
    "steps",
    "facts",
    "determinism",
    "speed",
    "models",
    "digest",
    "graphs",
)
CUDA_TESTS = ("tests/hashing/test_cuda.py", "tests/lightning/test_probes_cuda.py")
NO_TIME = 15.0  # seconds; with less left, nothing is started
CONTINUED = 3  # the exit status of a call after which another one is needed


@dataclass(frozen=True)
class Command:
    """A part that is a command.

    Attributes:
        words: The command.
        dry: The arguments of a dry run, in place of those from ``device`` on.
        needs: Seconds that must be left to start it, unless it is the first part of a call.
        continues: Whether a second run continues the first one.
    """

    words: Sequence[str | Path]
    needs: float
    continues: bool = False


def list_commands(folder: Path, *, dry: bool, limit: float) -> dict[str, Command]:
    """Return the parts that are commands, in their order."""
    python = sys.executable
    d9m = (python, "-m", "lightning_d9m")
    device = "cpu" if dry else "cuda"
    example = ["--accelerator", "cpu", "--epochs", "1", "--scenes", "32"]
    probes = ["--kinds", "Digits", "--variants", "module probes", "--rounds", "1"]
    audit = ["--quick", "-n", "2", "--ops", "index_add"]
    tests = ("-c", os.devnull, "--rootdir", ROOT, "--import-mode=importlib", "-m", "cuda", "-v")
    return {
        "example": Command(
            [
                *(*d9m, "repeat", "-n", "2", "-o", folder / "segmentation", "--json", "--"),
                *(python, "examples/segmentation.py"),
                *(example if dry else ["--accelerator", "gpu"]),
            ],
            needs=120,
        ),
        "probes": Command(
            [
                *(python, "benchmarks/probes.py", "--device", device),
                *("-o", folder / f"probes-{device}.json", *(probes if dry else [])),
            ],
            needs=300,
        ),
        "gpus": Command(
            [
                *(python, "benchmarks/several_gpus.py", "--device", device, "-o", folder),
                *(["--calls", "2"] if dry else []),
            ],
            needs=120,
        ),
        # Without the project's settings, which need a new pytest and plugins.
        "tests": Command(
            [
                *(python, "-m", "pytest", *tests, "-o", "markers=cuda: needs a CUDA device"),
                *("-p", "no:cacheprovider", "-p", "no:randomly", "-p", "pytest_rows", *CUDA_TESTS),
            ],
            needs=60,
            continues=True,
        ),
        "audit": Command(
            [
                *(*d9m, "audit", "ops", "--device", device, "-o", folder / "audit"),
                *(audit if dry else ["--runs", "30"]),
            ],
            needs=60,
            continues=True,
        ),
        "paper": Command(
            [
                *(python, "benchmarks/paper_ops.py", "--device", device, "--output", folder),
                *(["--runs", "2"] if dry else []),
            ],
            needs=120,
            continues=True,
        ),
        "graphsage": Command(
            [
                *(python, "benchmarks/graphsage.py", "--device", device, "--output", folder),
                *("--limit", str(int(limit - 60))),
                *(["--trainings", "2", "--epochs", "1"] if dry else []),
            ],
            needs=120,
            continues=True,
        ),
    }


class Suite:
    """A call of the suite.

    Args:
        folder: Where the results are.
        worker: Measures rows.
        commands: The parts that are commands.
        seconds: The time of the call.
        task_seconds: The most time of a row.
        about: What the report says about the call.
    """

    def __init__(
        self,
        folder: Path,
        worker: Worker,
        commands: Mapping[str, Command],
        *,
        seconds: float,
        task_seconds: float = 90.0,
        about: Row | None = None,
    ) -> None:
        self._folder = folder
        self._worker = worker
        self._commands = commands
        self._begin = time.monotonic()
        self._seconds = seconds
        self._task_seconds = task_seconds
        self._about = about or {}
        self.journal = Journal(folder / "rows.jsonl")

    @property
    def parts(self) -> list[str]:
        """All parts in their order."""
        return [*ROW_PARTS, *self._commands]

    def left(self) -> float:
        """Return the seconds that are left."""
        return self._seconds - (time.monotonic() - self._begin)

    def run(self, parts: Sequence[str]) -> int:
        """Run what is left of the parts; return the exit status."""
        is_first = True
        for part in parts:
            if self._has_ended(part):
                continue
            print(f"== {part}", flush=True)
            try:
                if part in self._commands:
                    self._run_command(part, self._commands[part], is_first=is_first)
                else:
                    self._run_rows(part)
            finally:
                self._worker.close()
                self.pack()
            is_first = False
        states = {part: self._find_state(part) for part in parts}
        for part, state in states.items():
            print(f"{part}: {state}", flush=True)
        if not all(self._has_ended(part) for part in parts):
            print("Call it again to continue.", flush=True)
            return CONTINUED
        return int(any(state != "complete" for state in states.values()))

    def pack(self) -> None:
        """Write the report, and the archive of all files."""
        page = render(self.journal, self.parts)
        (self._folder / "report.md").write_text(page, encoding="utf-8")
        archive = self._folder / "results.tgz"
        new = self._folder.with_name(f"{self._folder.name}.new")
        with tarfile.open(new, "w:gz") as file:
            for path in sorted(self._folder.rglob("*")):
                if path != archive and path.is_file():
                    file.add(path, path.relative_to(self._folder))
        new.replace(archive)

    def _run_rows(self, part: str) -> None:
        tasks = self._worker.ask(f"list {part}", START_SECONDS)
        if "error" in tasks:
            self._end(part, f"failed: {tasks['error']}")
            return
        self._greet()
        done = {row["task"] for row in self.journal.of_part(part)}
        for task in tasks["tasks"]:
            if task in done:
                continue
            if self.left() < NO_TIME:
                self._note_unfinished(part)
                return
            begin = time.monotonic()
            limit = min(self.left(), self._task_seconds)
            row = self._worker.ask(f"{part} {task}", limit)
            # What only the end of the call has cut short is measured again in the next one.
            if row.pop("is_late", False) and limit < min(self._task_seconds, self._seconds / 2):
                self._note_unfinished(part)
                return
            self._append({"part": part, "task": task, **row, "seconds": _round(begin)})
        rows = [row for row in self.journal.of_part(part) if row["task"] != "part"]
        failed = sum("error" in row for row in rows)
        state = f"{failed} of {len(rows)} rows failed" if failed else "complete"
        sizes = {
            name: max((row[name] for row in rows if row.get(name)), default=None)
            for name in ("host_mb", "device_mb")
        }
        self._end(part, state, seconds=round(sum(row["seconds"] for row in rows), 2), **sizes)

    def _run_command(self, part: str, command: Command, *, is_first: bool) -> None:
        limit = self.left() - NO_TIME
        if limit < (0 if is_first else command.needs):
            self._note_unfinished(part)
            return
        begin = time.monotonic()
        with (self._folder / f"{part}.log").open("ab") as log:
            status = run_limited(command.words, log, limit, self._folder / f"{part}.jsonl")
        tail = (self._folder / f"{part}.log").read_text(errors="replace").splitlines()[-20:]
        print("\n".join(tail), flush=True)
        if status is None and command.continues:
            self._note_unfinished(part)
        elif status is None:
            self._end(part, f"ended after {limit:.0f} s", seconds=_round(begin))
        else:
            state = "complete" if status == 0 else f"failed with status {status}"
            self._end(part, state, seconds=_round(begin))

    def _greet(self) -> None:
        if not any(row["part"] == "suite" for row in self.journal.rows):
            date = datetime.now(timezone.utc).strftime("%Y-%m-%d")
            row = {"part": "suite", "task": "-", "date": date}
            self._append({**row, **self._about, **self._worker.greeting})

    def _append(self, row: Row) -> None:
        self.journal.append(row)
        print(json.dumps(row), flush=True)

    def _end(self, part: str, state: str, **more: object) -> None:
        self._append({"part": part, "task": "part", "ended": True, "state": state, **more})

    def _note_unfinished(self, part: str) -> None:
        self._append({"part": part, "task": "part", "ended": False, "state": "unfinished"})

    def _find_part(self, part: str) -> Row:
        found = [row for row in self.journal.of_part(part) if row["task"] == "part"]
        return found[0] if found else {"ended": False, "state": "not reached"}

    def _has_ended(self, part: str) -> bool:
        return bool(self._find_part(part)["ended"])

    def _find_state(self, part: str) -> str:
        return str(self._find_part(part)["state"])


def run_limited(words: Sequence[str | Path], log: object, limit: float, rows: Path) -> int | None:
    """Run a command; return its exit status, or None if it was interrupted at its time limit."""
    tests = ROOT / "tests"
    paths = [ROOT, tests, tests / "support", BENCHMARKS, os.environ.get("PYTHONPATH", "")]
    variables = {
        "PYTHONPATH": os.pathsep.join(str(path) for path in paths if path),
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # products beside a second stream
        "PYTHONUNBUFFERED": "1",  # an interrupted part has a log
        "SUITE_ROWS": str(rows),
    }
    process = subprocess.Popen(
        [str(word) for word in words],
        stdout=log,
        stderr=subprocess.STDOUT,
        cwd=ROOT,
        env={**os.environ, **variables},
        start_new_session=True,
    )
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        return None
    finally:
        _end_group(process)


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """End a command and what it started: first by an interruption, which lets it write."""
    for number, seconds in ((signal.SIGINT, 10.0), (signal.SIGKILL, 10.0)):
        try:
            os.killpg(process.pid, number)
            process.wait(seconds)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


def _round(begin: float) -> float:
    return round(time.monotonic() - begin, 2)


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


def has_device() -> bool:
    """Return whether this Python's torch finds a CUDA device; not in this process."""
    code = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    return subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("parts", nargs="*", help="all, in their order")
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, with few calls")
    parser.add_argument("--seconds", type=float, default=570, help="time of this call")
    parser.add_argument("--rounds", type=int, help="number of timed calls (20)")
    parser.add_argument("--calls", type=int, help="number of compared calls (100)")
    parser.add_argument("--only", default="", help="only ops and models with this in their name")
    words = parser.parse_args()
    if not words.dry_run and not has_device():
        print(
            f"gpu_suite: {sys.executable} finds no torch with a CUDA device (set PYTHON to another "
            "one, or pass --dry-run)",
            file=sys.stderr,
        )
        sys.exit(2)
    folder = words.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    rounds = words.rounds or (1 if words.dry_run else 20)
    calls = words.calls or (2 if words.dry_run else 100)
    os.environ["PYTHONPATH"] = os.pathsep.join(
        path for path in (str(ROOT), str(BENCHMARKS), os.environ.get("PYTHONPATH", "")) if path
    )
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # products beside a second stream
    worker = Worker(
        [
            *(sys.executable, str(BENCHMARKS / "suite_worker.py")),
            *("cpu" if words.dry_run else "cuda", str(rounds), str(calls), words.only),
        ]
    )
    commands = list_commands(folder, dry=words.dry_run, limit=words.seconds)
    about = {"rounds": rounds, "calls": calls}
    task_seconds = words.seconds if words.dry_run else 90.0
    suite = Suite(
        *(folder, worker, commands), seconds=words.seconds, task_seconds=task_seconds, about=about
    )
    unknown = [part for part in words.parts if part not in suite.parts]
    if unknown:
        parser.error(f"no such part: {', '.join(unknown)}; the parts are {', '.join(suite.parts)}")
    with ended_by_exception():
        try:
            status = suite.run(words.parts or suite.parts)
        finally:
            worker.close()
    sys.exit(status)


if __name__ == "__main__":
    main()
