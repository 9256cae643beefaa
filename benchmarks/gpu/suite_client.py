"""The side of `gpu_suite.py`: a process that measures rows, and the journal of rows."""

import json
import os
import select
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

Row = dict[str, object]
MISSING = "ModuleNotFoundError"  # a part that failed for it runs again in the next call


class Worker:
    """A process that answers each line, the name of a task, with a line of JSON.

    Args:
        command: The command; the first line that it prints is its greeting.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._command = list(command)
        self._process: subprocess.Popen[bytes] | None = None
        self._end = 0.0
        self.greeting: Row = {}

    def ask(self, task: str, seconds: float) -> Row:
        """Return the answer, or ``{"error": ...}``; then the next call starts a new process.

        The seconds are for the start of a process, too. If no answer came in time, ``"is_late"`` is
        there as well.
        """
        self._end = time.monotonic() + seconds
        try:
            process = self._start()
            process.stdin.write(f"{task}\n".encode())
            process.stdin.flush()
            answer = self._read(process)
        except TimeoutError:
            self.close()
            return {"error": f"no answer within {seconds:.0f} seconds", "is_late": True}
        except (OSError, ValueError) as error:
            self.close()
            return {"error": str(error) or type(error).__name__}
        if answer.get("fatal"):
            self.close()
        return answer

    def close(self) -> None:
        """End the process, if there is one."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _start(self) -> subprocess.Popen[str]:
        if self._process is None:
            pipe = subprocess.PIPE
            self._process = subprocess.Popen(self._command, stdin=pipe, stdout=pipe)
            self.greeting = self._read(self._process)
        return self._process

    def _read(self, process: subprocess.Popen[bytes]) -> Row:
        if not select.select([process.stdout], [], [], max(self._end - time.monotonic(), 0))[0]:
            raise TimeoutError
        line = process.stdout.readline()
        if not line:
            raise ValueError(f"the worker ended with status {process.wait()}")
        return json.loads(line)


class Journal:
    """Rows of a file of JSON lines; each is on the disk before the next one is measured.

    Args:
        path: The file; a line that an interruption has cut is left out.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.rows = list(_read_rows(path))

    def append(self, row: Row) -> None:
        """Add a row."""
        self.rows.append(row)
        with self._path.open("ab+") as file:
            if file.tell():  # a line that was cut must not take this one along
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    file.write(b"\n")
            file.write(json.dumps(row).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

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
