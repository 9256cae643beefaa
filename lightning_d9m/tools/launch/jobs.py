"""Commands that run at once, each in its own session, with its own log."""

import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

from lightning_d9m.errors import LedgerError, file_errors
from lightning_d9m.tools.launch.processes import ProcessTree, signals_deferred, subreaper_enabled

_POLL_SECONDS = 0.1
# A job that runs a training ends it first.
_GRACE_SECONDS = 10.0


def run_jobs(
    commands: Mapping[Path, Sequence[str]], jobs: int, note: Callable[[Path, int], object]
) -> None:
    """Run commands, at most ``jobs`` at once, until all have ended.

    A signal to this process ends all of them, with the processes that they have started.

    Args:
        commands: The commands by their logs, in the order in which they start.
        jobs: How many run at once.
        note: Called with the log and the exit status of each command that has ended; what it raises
            ends the others.

    Raises:
        LedgerError: If a log cannot be made.
    """
    waiting = list(commands)
    running: dict[Path, subprocess.Popen[bytes]] = {}
    tree = ProcessTree([], frozenset(child.pid for child in psutil.Process().children()))
    with signals_deferred() as received, subreaper_enabled():
        try:
            while (waiting or running) and not received:
                while waiting and len(running) < jobs:
                    log = waiting.pop(0)
                    running[log] = _start(commands[log], log)
                    tree.leaders.append(running[log])
                time.sleep(_POLL_SECONDS)
                for log, job in list(running.items()):
                    if job.poll() is not None:
                        del running[log]
                        note(log, job.returncode)
        finally:
            # The first signal ends the jobs; a second one kills them at once.
            expected = max(1, len(received))
            tree.end(_GRACE_SECONDS, lambda: len(received) > expected)


def _start(command: Sequence[str], log: Path) -> "subprocess.Popen[bytes]":
    with file_errors(LedgerError, f"The log {log} cannot be made"):
        output = log.open("wb")
    with output:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a signal to its group reaches what it has started
        )
