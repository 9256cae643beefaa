"""Supervision of the worker of ``d9m audit ops``, which is restarted after a case crashes it."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from threading import Timer
from typing import Any

from lightning_d9m.audit.ops.rows import RowFile
from lightning_d9m.errors import CommandError, SettingError
from lightning_d9m.launch.progress import StatusLine

_CONDITIONS = ("default", "deterministic", "patched", "oracle")
_START_SECONDS = 300.0
_WORKER = [sys.executable, "-m", "lightning_d9m.audit.ops.worker"]


def measure_rows(
    rows: RowFile, settings: Mapping[str, Any], timeout: float, log: Path
) -> dict[str, Any]:
    """Measure every case that has no row yet, and return the facts that the worker reports.

    Raises:
        SettingError: The worker rejects the settings.
        CommandError: The worker ends before its first case.
    """
    with StatusLine() as line:
        supervisor = _Supervisor(rows, timeout, line)
        while True:
            request = {**settings, "done": [row["key"] for row in rows.rows]}
            with log.open("ab") as errors:
                end = supervisor.run_worker(request, errors)
            if end is None:
                return supervisor.facts
            if supervisor.begun is None:
                raise CommandError(
                    f"The measuring process ended ({end}) before its first case. Its output is in "
                    f"{log}."
                )
            rows.add(_make_lost_row(supervisor.begun, end))


class _Supervisor:
    """Runs workers: adds their rows, shows progress, and kills one that hangs."""

    def __init__(self, rows: RowFile, timeout: float, line: StatusLine) -> None:
        self.facts: dict[str, Any] = {}
        self.begun: dict[str, Any] | None = None
        self._rows = rows
        self._timeout = timeout
        self._total = 0
        self._line = line

    def run_worker(self, request: Mapping[str, Any], errors: Any) -> str | None:
        """Run a worker; return how it ended, or None if it has measured every case."""
        self.begun = None
        late: list[float] = []
        with subprocess.Popen(
            _WORKER, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as process:
            assert process.stdin is not None, "the pipe was requested"
            try:
                with suppress(BrokenPipeError), process.stdin as stream:
                    stream.write(json.dumps(request))
                for event in self._read_events(process, late):
                    self._handle(event["event"], event["value"])
                status = process.wait()
            finally:  # after an interruption the case is measured again
                process.kill()
        if late:
            return f"killed because it was still running after {late[0]:g} s"
        if status == -signal.SIGKILL:
            return "killed, as the system does if it runs out of memory"
        if status < 0:
            return f"ended by {signal.Signals(-status).name}"
        return f"ended with exit status {status}" if status else None

    def _read_events(
        self, process: "subprocess.Popen[str]", late: list[float]
    ) -> Iterator[dict[str, Any]]:
        """Yield the events; kill the worker if the next one does not come in time."""
        assert process.stdout is not None, "the pipe was requested"
        event: dict[str, Any] | None = {}
        while event is not None:
            limit = self._timeout if self.begun else _START_SECONDS
            timer = Timer(limit, _end_late, (process, late, limit))
            timer.start()
            try:
                event = next(filter(None, map(_parse_event, process.stdout)), None)
            finally:
                timer.cancel()
            if event is not None:
                yield event

    def _handle(self, kind: str, value: Any) -> None:
        if kind == "problem":
            raise SettingError(value)
        if kind == "facts":
            self.facts = value
        elif kind == "plan":
            self._total = len(value)
        elif kind == "begin":
            self.begun = value
            text = f"[{len(self._rows.rows) + 1} of {self._total}] {value['key']}"
            self._line.update(text)
            if not self._line.live:
                print(text, file=sys.stderr, flush=True)
        elif kind == "row":
            self._rows.add(value)
            self.begun = None


def _end_late(process: "subprocess.Popen[str]", late: list[float], limit: float) -> None:
    late.append(limit)
    process.kill()


def _parse_event(line: str) -> dict[str, Any] | None:
    """Return an event; None for a line that a library printed."""
    with suppress(ValueError):
        event = json.loads(line)
        return event if isinstance(event, dict) else None
    return None


def _make_lost_row(begun: Mapping[str, Any], reason: str) -> dict[str, Any]:
    """Return the row of a case that ended its process."""
    entry = {"outcome": "lost", "reason": f"The process was {reason}."}
    return {**begun, "conditions": dict.fromkeys(_CONDITIONS, entry)}
