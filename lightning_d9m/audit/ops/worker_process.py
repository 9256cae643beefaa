"""The measurement of all cases, in a worker that is restarted after a case has crashed it.

Each row is appended to a file when it is measured, with what it depends on, so that an interrupted
audit continues there. The worker is this module, run as a program.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path
from typing import IO, Any

from lightning_d9m.errors import CommandError, file_errors
from lightning_d9m.launch.progress import StatusLine

_CONDITIONS = ("default", "deterministic", "patched", "oracle")
_START_SECONDS = 300.0
_WORKER = [sys.executable, "-m", "lightning_d9m.audit.ops.worker_process"]


def measure_rows(
    folder: Path, plan: Sequence[Mapping[str, Any]], settings: Mapping[str, Any], timeout: float
) -> list[dict[str, Any]]:
    """Measure every case that has no row in the folder yet, and return all rows.

    Args:
        folder: The folder of the rows, and of the log with what the worker prints.
        plan: The row of each case without its conditions.
        settings: What the rows depend on; rows with other settings are left alone.
        timeout: Seconds after which a case counts as hanging.

    Raises:
        CommandError: The worker ends before its first case, or the folder cannot be written.
    """
    worker: _Worker | None = None
    what = f"The rows of the audit cannot be written to {folder}"
    try:
        with file_errors(CommandError, what, "Give a different folder with --output."):
            folder.mkdir(parents=True, exist_ok=True)
            done = _read_rows(folder / "ops.jsonl", settings)
            with (
                StatusLine() as line,
                (folder / "worker.log").open("ab") as errors,
                (folder / "ops.jsonl").open("a") as file,
            ):
                for number, row in enumerate(plan, start=1):
                    if row["key"] in done:
                        continue
                    text = f"[{number} of {len(plan)}] {row['key']}"
                    line.update(text)
                    if not line.live:
                        print(text, file=sys.stderr, flush=True)
                    worker = worker or _Worker(settings, errors)
                    conditions = worker.ask(row["key"], timeout)
                    if conditions is None:
                        entry = {"outcome": "lost", "reason": f"The process was {worker.end()}."}
                        conditions, worker = dict.fromkeys(_CONDITIONS, entry), None
                    done[row["key"]] = {**row, "conditions": conditions}
                    # After a line that an interruption cut, a new one begins.
                    file.write(f"\n{json.dumps({'settings': settings, 'row': done[row['key']]})}")
                    file.flush()
    finally:  # after an interruption the case is measured again
        if worker is not None:
            worker.end()
    return [done[row["key"]] for row in plan]


def _read_rows(path: Path, settings: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the rows that a file has for these settings, by key."""
    rows = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        with suppress(ValueError, KeyError, TypeError):  # it was cut
            record = json.loads(line)
            if record["settings"] == settings:
                rows[record["row"]["key"]] = record["row"]
    return rows


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
        with suppress(BrokenPipeError):
            print(json.dumps(request), file=self._process.stdin, flush=True)
        if not wait([self._process.stdout.fileno()], seconds):
            self._late = seconds
            self._process.kill()
            return None
        answer = self._process.stdout.readline()
        return json.loads(answer) if answer.endswith("\n") else None

    def end(self) -> str:
        """End the process, and return how it ended."""
        with suppress(subprocess.TimeoutExpired):
            self._process.communicate(timeout=1)
        self._process.kill()
        with suppress(BrokenPipeError), self._process:  # closes its pipes
            status = self._process.wait()
        if self._late:
            return f"killed because it was still running after {self._late:g} s"
        if status == -signal.SIGKILL:
            return "killed, as the system does if it runs out of memory"
        if status < 0:
            return f"ended by {signal.Signals(-status).name}"
        return f"ended with exit status {status}"


def main() -> int:
    """Measure the cases that standard input requests; return 0 after the last one.

    It reads one line of JSON for each case, and writes one line with what it measured. What a
    library prints goes to standard error.
    """
    import torch

    from lightning_d9m.audit.ops.cases import list_cases
    from lightning_d9m.audit.ops.conditions import measure_case

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    settings = json.loads(sys.stdin.readline())
    if settings["threads"] is not None:
        torch.set_num_threads(settings["threads"])
    cases = {case.key(dtype): (case, dtype) for case in list_cases() for dtype in case.dtypes}
    print(json.dumps(list(cases)), file=answers, flush=True)
    for line in sys.stdin:
        case, dtype = cases[json.loads(line)]
        limits = settings["runs"], settings["seconds"]
        conditions = measure_case(case, settings["device"], dtype, *limits)
        print(json.dumps(conditions), file=answers, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
