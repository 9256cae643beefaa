"""The worker of ``d9m audit ops``, watched: started again when a case has ended it."""

import json
import os
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

if TYPE_CHECKING:
    from typing_extensions import Self

_ARMS = ("default", "deterministic", "ours", "oracle")
_START_SECONDS = 300.0
_WORKER = [sys.executable, "-m", "lightning_d9m.audit.ops.worker"]
_MISUSE = 2


def measure_rows(
    rows: RowFile, settings: Mapping[str, Any], timeout: float, log: Path
) -> dict[str, Any]:
    """Measure every case that has no row yet, and return the facts that the worker tells.

    Args:
        rows: Where the rows go; cases that it holds are not measured again.
        settings: What the worker is asked for.
        timeout: Seconds after which a case counts as hanging.
        log: File that takes what the worker prints besides its rows.

    Raises:
        SettingError: When the worker cannot do what the settings say.
        CommandError: When it ends before it has begun a case.
    """
    watch = _Watch(rows, timeout)
    while True:
        request = {**settings, "done": [row["key"] for row in rows.rows]}
        with log.open("ab") as errors, _Worker(request, errors) as worker:
            watch.follow(worker)
        if watch.finished:
            watch.say("")
            return watch.facts
        if watch.begun is None:
            raise CommandError(
                f"The process that measures ended ({worker.describe_end()}) before it had begun a "
                f"case. What it printed is in {log}."
            )
        rows.add(_lost_row(watch.begun, watch.loss or worker.describe_end()))


class _Worker:
    """A worker process, and its events in a queue; None ends them."""

    def __init__(self, request: Mapping[str, Any], errors: Any) -> None:
        self.events: Queue[dict[str, Any] | None] = Queue()
        self.process = subprocess.Popen(
            _WORKER, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
        )
        assert self.process.stdin is not None, "it was asked for"
        with suppress(BrokenPipeError), self.process.stdin as stream:
            stream.write(json.dumps(request))
        Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None, "it was asked for"
        for line in self.process.stdout:
            with suppress(ValueError):  # a library printed; only our lines are JSON
                event = json.loads(line)
                if isinstance(event, dict):
                    self.events.put(event)
        self.events.put(None)

    def __enter__(self) -> "Self":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:  # an interruption waits for nothing: the case is measured again
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(5)
        self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()

    def describe_end(self) -> str:
        status = self.process.returncode
        if status == -signal.SIGKILL:
            return "killed, as the system does when memory is used up"
        if status < 0:
            return f"ended by {signal.Signals(-status).name}"
        return f"ended with exit status {status}"


class _Watch:
    """Follows workers: adds their rows, shows progress, and ends one that hangs."""

    def __init__(self, rows: RowFile, timeout: float) -> None:
        self.facts: dict[str, Any] = {}
        self.begun: dict[str, Any] | None = None
        self.loss: str | None = None
        self.finished = False
        self._rows = rows
        self._timeout = timeout
        self._total = 0
        self._live = sys.stderr.isatty()

    def follow(self, worker: _Worker) -> None:
        self.begun = self.loss = None
        while True:
            patience = self._patience()
            try:
                event = worker.events.get(timeout=patience)
            except Empty:
                worker.process.kill()
                self.loss = f"still running after {patience:g} s, and ended"
                return
            if event is None:
                worker.process.wait()
                self.finished = worker.process.returncode == 0
                return
            self._take(event["event"], event["value"])

    def _patience(self) -> float:
        return self._timeout if self.begun else _START_SECONDS

    def _take(self, kind: str, value: Any) -> None:
        if kind == "problem":
            raise SettingError(value)
        if kind == "facts":
            self.facts = value
        elif kind == "plan":
            self._total = len(value)
        elif kind == "begin":
            self.begun = value
            self.say(f"[{len(self._rows.rows) + 1} of {self._total}] {value['key']}")
        elif kind == "row":
            self._rows.add(value)
            self.begun = None

    def say(self, text: str) -> None:
        """Show what is being measured, on one line where a person watches."""
        if self._live:
            width = os.get_terminal_size(sys.stderr.fileno()).columns - 1
            print(f"\r{text[:width]}\x1b[K", end="", file=sys.stderr, flush=True)
        elif text:
            print(text, file=sys.stderr, flush=True)


def _lost_row(begun: Mapping[str, Any], reason: str) -> dict[str, Any]:
    """Return the row of a case that ended its process."""
    arm = {"outcome": "lost", "reason": f"The process was {reason}."}
    return {**begun, "arms": dict.fromkeys(_ARMS, arm)}
