"""Supervision of the worker of ``d9m audit ops``, which is restarted after a case crashes it."""

import json
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from queue import Empty, Queue
from threading import Thread
from typing import TYPE_CHECKING, Any

from lightning_d9m.audit.ops.rows import RowFile
from lightning_d9m.errors import CommandError, SettingError
from lightning_d9m.launch.progress import StatusLine

if TYPE_CHECKING:
    from typing_extensions import Self

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
            with log.open("ab") as errors, _Worker(request, errors) as worker:
                supervisor.follow(worker)
            if supervisor.finished:
                return supervisor.facts
            if supervisor.begun is None:
                raise CommandError(
                    f"The measuring process ended ({worker.describe_end()}) before its first case. "
                    f"Its output is in {log}."
                )
            rows.add(_make_lost_row(supervisor.begun, supervisor.loss or worker.describe_end()))


class _Worker:
    """A worker process, and a queue of its events that ends with None."""

    def __init__(self, request: Mapping[str, Any], errors: Any) -> None:
        self.events: Queue[dict[str, Any] | None] = Queue()
        self.process = subprocess.Popen(
            _WORKER, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
        )
        assert self.process.stdin is not None, "the pipe was requested"
        with suppress(BrokenPipeError), self.process.stdin as stream:
            stream.write(json.dumps(request))
        Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None, "the pipe was requested"
        for line in self.process.stdout:
            with suppress(ValueError):  # a library printed; only the events are JSON
                event = json.loads(line)
                if isinstance(event, dict):
                    self.events.put(event)
        self.events.put(None)

    def __enter__(self) -> "Self":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:  # after an interruption the case is measured again
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(5)
        self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()

    def describe_end(self) -> str:
        status = self.process.returncode
        if status == -signal.SIGKILL:
            return "killed, as the system does if it runs out of memory"
        if status < 0:
            return f"ended by {signal.Signals(-status).name}"
        return f"ended with exit status {status}"


class _Supervisor:
    """Reads the events of workers: adds their rows, shows progress, and kills one that hangs."""

    def __init__(self, rows: RowFile, timeout: float, line: StatusLine) -> None:
        self.facts: dict[str, Any] = {}
        self.begun: dict[str, Any] | None = None
        self.loss: str | None = None
        self.finished = False
        self._rows = rows
        self._timeout = timeout
        self._total = 0
        self._line = line

    def follow(self, worker: _Worker) -> None:
        self.begun = self.loss = None
        while True:
            timeout = self._time_limit()
            try:
                event = worker.events.get(timeout=timeout)
            except Empty:
                worker.process.kill()
                self.loss = f"killed because it was still running after {timeout:g} s"
                return
            if event is None:
                worker.process.wait()
                self.finished = worker.process.returncode == 0
                return
            self._handle(event["event"], event["value"])

    def _time_limit(self) -> float:
        return self._timeout if self.begun else _START_SECONDS

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


def _make_lost_row(begun: Mapping[str, Any], reason: str) -> dict[str, Any]:
    """Return the row of a case that ended its process."""
    entry = {"outcome": "lost", "reason": f"The process was {reason}."}
    return {**begun, "conditions": dict.fromkeys(_CONDITIONS, entry)}
