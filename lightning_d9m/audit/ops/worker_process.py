"""The measurement of all cases, in a worker that is restarted after a case has crashed it.

Each row is appended to a file when it is measured, from which an interrupted audit continues.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Timer
from typing import IO, Any

from lightning_d9m.errors import CommandError, SettingError
from lightning_d9m.launch.progress import StatusLine

ROW_SCHEMA = 2
_CONDITIONS = ("default", "deterministic", "patched", "oracle")
_START_SECONDS = 300.0
_WORKER = [sys.executable, "-m", "lightning_d9m.audit.ops.worker"]


class RowFile:
    """A file of JSON lines: first the settings, then one row for each case.

    An incomplete row at the end, left by an interruption, is removed and measured again.

    Args:
        path: The file; created if it does not exist.
        settings: The settings of the rows. An existing file must have the same.

    Raises:
        SettingError: The file has different settings.
        CommandError: The file cannot be read or written, or is not a file of rows.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self.rows: list[dict[str, Any]] = []
        self._settings = dict(settings)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            text = path.read_bytes() if path.exists() else b""
            whole = text[: text.rfind(b"\n") + 1]
            self._load(path, whole.splitlines())
            if len(whole) < len(text):
                os.truncate(path, len(whole))
            self._file = path.open("ab")
        except OSError as error:
            raise CommandError(
                f"The rows of the audit cannot be written to {path}: {error.strerror or error}. "
                "Give a different folder with --output."
            ) from error

    def add(self, row: dict[str, Any]) -> None:
        """Append a row and flush the file."""
        # The settings come with the first row: those that measure nothing do not claim the folder.
        head = [] if self._file.tell() else [{"schema": ROW_SCHEMA, "settings": self._settings}]
        for record in (*head, row):
            self._file.write(json.dumps(record).encode() + b"\n")
        self._file.flush()
        self.rows.append(row)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _load(self, path: Path, lines: Sequence[bytes]) -> None:
        known = self._settings
        try:
            for number, line in enumerate(lines):
                record = json.loads(line)
                if number:
                    self.rows.append({"key": record["key"], **record})
                else:
                    known = {ROW_SCHEMA: record["settings"]}[record["schema"]]
        except (ValueError, KeyError, TypeError) as error:
            raise CommandError(
                f"{path} is not a file of rows that this version of the command wrote. Give a "
                "different folder with --output, or remove the file."
            ) from error
        both = known, self._settings
        names = sorted(name for name in {**known, **self._settings} if _differs(name, *both))
        if names:
            values = ((name, *(repr(own.get(name)) for own in both)) for name in names)
            listed = "".join(f"\n  {n}: expected: {e}\n  {n}: actual:   {a}" for n, e, a in values)
            raise SettingError(
                f"{path} contains rows that were measured with different settings:{listed}\n"
                "Give the same settings to continue that audit, or a different folder with "
                "--output."
            )


def _differs(name: str, expected: Mapping[str, Any], actual: Mapping[str, Any]) -> bool:
    return bool(expected.get(name) != actual.get(name))


def measure_rows(
    rows: RowFile,
    plan: Sequence[dict[str, Any]],
    settings: Mapping[str, Any],
    timeout: float,
    log: Path,
) -> None:
    """Measure every case that has no row yet.

    Args:
        rows: Their file.
        plan: The row of each case without its conditions.
        settings: The settings of the worker.
        timeout: Seconds after which a case counts as hanging.
        log: The file that receives what the worker prints.

    Raises:
        CommandError: The worker ends before its first case.
    """
    done = {row["key"] for row in rows.rows}
    worker: _Worker | None = None
    try:
        with StatusLine() as line, log.open("ab") as errors:
            for row in plan:
                if row["key"] in done:
                    continue
                text = f"[{len(rows.rows) + 1} of {len(plan)}] {row['key']}"
                line.update(text)
                if not line.live:
                    print(text, file=sys.stderr, flush=True)
                worker = worker or _Worker(settings, errors)
                conditions = worker.ask(row["key"], timeout)
                if conditions is None:
                    entry = {"outcome": "lost", "reason": f"The process was {worker.end()}."}
                    conditions, worker = dict.fromkeys(_CONDITIONS, entry), None
                rows.add(row | {"conditions": conditions})
    finally:  # after an interruption the case is measured again
        if worker is not None:
            worker.end()


class _Worker:
    """A worker process; it is killed if an answer does not come in time."""

    def __init__(self, settings: Mapping[str, Any], errors: IO[bytes]) -> None:
        self._late = 0.0
        self._process = subprocess.Popen(
            _WORKER, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
        )
        if self.ask(settings, _START_SECONDS) is None:
            raise CommandError(
                f"The measuring process was {self.end()} before its first case. Its output is in "
                f"{errors.name}."
            )

    def ask(self, request: object, seconds: float) -> Any:
        """Send a request, and return the answer; None if the process has ended without."""
        assert self._process.stdin is not None, "the pipe was requested"
        assert self._process.stdout is not None, "the pipe was requested"
        timer = Timer(seconds, self._kill_late, [seconds])
        timer.start()
        try:
            with suppress(BrokenPipeError):
                print(json.dumps(request), file=self._process.stdin, flush=True)
            answer = self._process.stdout.readline()
        finally:
            timer.cancel()
        return json.loads(answer) if answer.endswith("\n") else None

    def _kill_late(self, seconds: float) -> None:
        self._late = seconds
        self._process.kill()

    def end(self) -> str:
        """End the process, and return how it ended."""
        with suppress(subprocess.TimeoutExpired):
            self._process.communicate(timeout=1)
        self._process.kill()
        status = self._process.wait()
        if self._late:
            return f"killed because it was still running after {self._late:g} s"
        if status == -signal.SIGKILL:
            return "killed, as the system does if it runs out of memory"
        if status < 0:
            return f"ended by {signal.Signals(-status).name}"
        return f"ended with exit status {status}"
