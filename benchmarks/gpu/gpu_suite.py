"""All measurements and tests for a CUDA machine: ``bash gpu_suite.sh FOLDER [PART...]``.

A call runs the parts in their order, what decides first, and ends within SECONDS. The next call
with the same folder, or with its ``rows.jsonl`` on another machine, continues where it ended until
every part has ended; then the exit status is 0, or 1 if something failed. It is 3 if another call
is needed, and 2 if this Python lacks a package: nothing is run then. Packages in a folder
``vendor`` of the repository are found; ``pip install --no-deps --target vendor msgspec`` makes one.

Each part is a process. Those that measure rows, and tests, note each task when it begins: one that
ends its process fails when it has done so twice, and the next process continues after it.

FOLDER receives few files: ``rows.jsonl``, to which each row is appended when it is measured,
``report.md``, and after each part ``results.tgz``, which has the logs, too. Whatever interrupts a
call, what was measured before is kept.

``--dry-run`` runs every part on the CPU with few calls, which shows only that it runs.
"""

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from suite_journal import CONTINUED, Journal, Row, lacks
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
PARTS = (*FIRST, "speed", "graphs", "digest", "portable", "facts", "probes", "audit")
CUDA_TESTS = ("tests/hashing/test_cuda.py", "tests/lightning/test_probes_cuda.py")
NO_TIME = 20.0  # seconds; with less left, nothing is started
MOST_BYTES = 2**22  # of a file in the archive
MOST_LATE = 3  # calls in which a command that continues may be cut off without a row


@dataclass(frozen=True)
class Command:
    """A part.

    Attributes:
        line: Of the shell.
        needs: Seconds that must be left to start it, unless it is the first part of a call.
        continues: Whether a second run continues the first one.
    """

    line: str
    needs: float
    continues: bool = False


def list_commands(work: Path, settings: str = "", *, dry: bool) -> dict[str, Command]:
    """Return all parts; those that have files write them into a folder of their own.

    Args:
        work: The folder.
        settings: Arguments of the parts that measure rows.
        dry: Whether the parts run on the CPU, with few calls.
    """
    python, work = shlex.quote(sys.executable), shlex.quote(str(work))
    d9m = f"{python} -m lightning_d9m"
    device, where = ("cpu", "--accelerator cpu") if dry else ("cuda", "--accelerator gpu")
    digits = f"{python} examples/digits.py --epochs 1"
    scenes = f"{python} examples/segmentation.py {where}"
    few_scenes = f"{scenes} --epochs 1 --scenes 64"
    portable = "export LIGHTNING_D9M_PORTABLE=1; LIGHTNING_D9M_LEDGER_DIR"
    probes = "--kinds Digits --variants 'module probes' --rounds 1" if dry else ""
    audit = "--quick -n 2 --ops index_add" if dry else "--runs 30"
    # Without the project's settings and fixtures, which need plugins and hypothesis.
    tests = f"-c {os.devnull} --rootdir {shlex.quote(str(ROOT))} --import-mode=importlib -m cuda -v"
    tests += " --noconftest -p no:cacheprovider -p no:randomly -p pytest_rows"
    tests += f" -o 'markers=cuda: needs a CUDA device' {' '.join(CUDA_TESTS)}"
    worker = f"{python} {shlex.quote(str(HERE / 'suite_worker.py'))}"
    return {
        **{part: Command(f"{worker} {part} {settings}", 10, continues=True) for part in PARTS},
        "doctor": Command(f"{d9m} doctor --json", 30),
        "example": Command(
            f"{d9m} repeat -n 2 -o {work}/segmentation --json -- "
            + (f"{scenes} --epochs 1 --scenes 32" if dry else scenes),
            needs=60,
        ),
        # One digest on the CPU and on the device.
        "training": Command(
            f"{portable}={work}/cpu {digits} && {portable}={work}/device {digits} {where} && "
            f"{d9m} compare {work}/cpu {work}/device",
            needs=60,
        ),
        # Gradients that race without the settings: the runs differ, and the command finds where.
        "race": Command(
            f"{d9m} locate --no-determinism -o {work}/race -- {few_scenes}; "
            f"test $? = {int(not dry)}",
            needs=60,
        ),
        "tests": Command(f"{python} -m pytest {tests}", 30, continues=True),
        "resume": Command(f"{d9m} repeat --interrupt -o {work}/resume -- {digits} {where}", 60),
        "probes": Command(
            f"{python} benchmarks/cost/probes.py --device {device} -o {work}/probes.json {probes}",
            needs=300,
        ),
        "audit": Command(
            f"{d9m} audit ops --device {device} -o {work}/audit {audit}", 60, continues=True
        ),
    }


class Suite:
    """A call of the suite.

    Args:
        folder: Where the results are.
        work: The folder of logs, and of what commands write.
        commands: The parts.
        seconds: The time of the call.
        clock: Returns seconds.
        run: Runs a command; see :func:`run_limited`.
    """

    def __init__(
        self,
        folder: Path,
        work: Path,
        commands: Mapping[str, Command],
        *,
        seconds: float,
        clock: Callable[[], float] = time.monotonic,
        run: Callable[..., int | None] | None = None,
    ) -> None:
        self._folder, self._work, self._commands = folder, work, commands
        self._clock, self._run_line = clock, run or run_limited
        self._begin, self._seconds = clock(), seconds
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
                self._run_part(part, self._commands[part], limit, is_first=is_first)
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

    def _run_part(self, part: str, command: Command, limit: float, *, is_first: bool) -> None:
        if limit < (0 if is_first else command.needs):
            self._end(part, "unfinished", ended=False)
            return
        begin, path = self._clock(), self._work / f"{part}.log"
        with path.open("ab") as log:
            known = log.tell()  # of earlier calls, whose errors are not this one's
            status, grows = self._run_to_end(command, log, begin + limit)
        tail = path.read_bytes()[known:].decode(errors="replace")[-4000:]
        print("\n".join(tail.splitlines()[-20:]), flush=True)
        rows = self.journal.of_tasks(part)
        failed = sum("error" in row for row in rows)
        seconds = sum(row.get("seconds", 0) for row in rows) if rows else self._clock() - begin
        found: Row = {"said": "" if rows and not status else tail, "seconds": round(seconds, 2)}
        is_late = status is None and command.continues
        if is_late and (grows or self._count_late(part) < MOST_LATE):
            self._end(part, "unfinished", ended=False, late=not grows)
        elif status == 0:
            state = f"{failed} of {len(rows)} rows failed" if failed else "complete"
            self._end(part, state, ended=not any(map(lacks, rows)), **found)
        else:
            state = f"ended after {limit:.0f} s" if status is None else f"status {status}"
            self._end(part, f"failed: {state}", ended=not lacks({"said": tail}), **found)

    def _run_to_end(self, command: Command, log: object, end: float) -> tuple[int | None, bool]:
        """Run a command again while it has more to do; return its status, and whether rows grew.

        The status is None if the time is over.
        """
        before = len(self.journal)
        while True:
            known = len(self.journal)
            status = self._run_line(command.line, log, end - self._clock(), self._rows)
            self.journal = Journal(self._rows)  # the command writes its rows itself
            grows = len(self.journal) > known
            if not (status and command.continues and grows):
                return status, len(self.journal) > before
            if end <= self._clock():
                return None, True

    def _end(self, part: str, state: str, *, ended: bool, **more: object) -> None:
        """Note the end of a part; one that lacks a package has not ended."""
        row: Row = {"part": part, "task": "part", "ended": ended, "state": state, **more}
        self.journal.append(row)
        print(json.dumps({**row, "said": ""})[:2000], flush=True)

    def _count_late(self, part: str) -> int:
        return sum(row["part"] == part and row.get("late", False) for row in self.journal.rows)

    def _has_ended(self, part: str) -> bool:
        return bool(self.journal.find_end(part)["ended"])


def run_limited(line: str, log: object, limit: float, rows: Path) -> int | None:
    """Run a line of the shell; return its status, or None if it was interrupted at its limit."""
    variables = {
        "PYTHONUNBUFFERED": "1",  # an interrupted part has a log
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "SUITE_ROWS": str(rows),
    }
    process = subprocess.Popen(
        ["bash", "-c", line],
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
    scripts = [HERE, BENCHMARKS / "cost"]
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
    device = "cpu" if words.dry_run else "cuda"
    settings = shlex.join([device, str(rounds), str(calls), words.only])
    commands = list_commands(work, settings, dry=words.dry_run)
    suite = Suite(folder, work, commands, seconds=words.seconds - (time.monotonic() - begin))
    with ended_by_exception():
        sys.exit(suite.run(words.parts or PARTS))


if __name__ == "__main__":
    main()
