"""The journal of `gpu_suite.py`: what each process of it has measured, task by task."""

import faulthandler
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

Row = dict[str, object]
MISSING = "ModuleNotFoundError"  # a part that failed for it runs again in the next call
TASK_SECONDS = 90.0
TRIES = 2  # the end of a call may interrupt a task, or another program may end its process
CONTINUED = 3  # the exit status of a process or a call after which another one is needed


class Journal:
    """Rows of a file of JSON lines; each is on the disk before the next one is measured.

    A task has a row when it begins, so that the next process knows which one ended this one.

    Args:
        path: The file; a line that an interruption has cut is left out.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.rows: list[Row] = []
        self._count = 0
        self._begun = Counter[tuple[object, object]]()
        for row in _read_rows(path):
            self._note(row)

    def append(self, row: Row) -> None:
        """Add a row."""
        self._note(row)
        with self._path.open("ab+") as file:
            if file.tell():  # a line that was cut must not take this one along
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    file.write(b"\n")
            file.write(json.dumps(row).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def __len__(self) -> int:
        """Return the number of rows, with those of tasks that begin."""
        return self._count

    def begin(self, part: str, task: str) -> None:
        """Note that a task begins."""
        self.append({"part": part, "task": task, "begun": True})

    def has_ended(self, part: str, task: str) -> bool:
        """Return whether a task is not to be run; one that has ended its processes fails here."""
        if any(row["task"] == task and not lacks(row) for row in self.of_part(part)):
            return True
        if self._begun[part, task] < TRIES:
            return False
        error = f"{TRIES} processes ended while they ran it, or after {TASK_SECONDS:.0f} seconds"
        self.append({"part": part, "task": task, "verdict": "failed", "error": error})
        return True

    def of_part(self, part: str) -> list[Row]:
        """Return the rows of a part, the last one of each task."""
        found = {row["task"]: row for row in self.rows if row["part"] == part}
        return list(found.values())

    def of_tasks(self, part: str) -> list[Row]:
        """Return the same without the row about the part itself."""
        return [row for row in self.of_part(part) if row["task"] != "part"]

    def find_end(self, part: str) -> Row:
        """Return the row about a part itself: whether and how it has ended."""
        found = [row for row in self.of_part(part) if row["task"] == "part"]
        return found[0] if found else {"ended": False, "state": "not reached"}

    def _note(self, row: Row) -> None:
        self._count += 1
        place = row["part"], row["task"]
        if "begun" in row:
            self._begun[place] += 1
        else:
            self.rows.append(row)
            self._begun[place] = 0


def run_tasks(
    journal: Journal,
    part: str,
    tasks: Iterable[str],
    measure: Callable[[str], Row],
    *,
    apart: bool = False,
) -> None:
    """Measure the tasks that have no row yet.

    A task that takes too long ends the process, whatever it waits for. So does one after which the
    device no longer works, or each one on request; the exit status asks for another process.
    """
    for task in tasks:
        if journal.has_ended(part, task):
            continue
        journal.begin(part, task)
        faulthandler.dump_traceback_later(TASK_SECONDS, exit=True)
        begin = time.monotonic()
        row = measure(task)
        faulthandler.cancel_dump_traceback_later()
        row = {"part": part, "task": task, **row, "seconds": round(time.monotonic() - begin, 2)}
        journal.append(row)
        print(json.dumps(row)[:2000], flush=True)
        if apart or row.get("fatal"):
            sys.exit(CONTINUED)


def lacks(row: Row) -> bool:
    """Return whether a row failed for a package that is missing."""
    return MISSING in f"{row.get('error', '')}{row.get('said', '')}"


def _read_rows(path: Path) -> Iterator[Row]:
    if not path.exists():
        return
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and {"part", "task"} <= row.keys():
            yield row
