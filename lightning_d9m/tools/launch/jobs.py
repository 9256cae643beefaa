"""Commands that run at once, each in its own session, with its own log."""

import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from lightning_d9m.tools.launch.processes import running_processes, start_process

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
    with running_processes(_GRACE_SECONDS) as (tree, received):
        while (waiting or running) and not received:
            while waiting and len(running) < jobs:
                log = waiting.pop(0)
                running[log] = start_process(commands[log], None, log)
                tree.leaders.append(running[log])
            time.sleep(_POLL_SECONDS)
            for log, job in list(running.items()):
                if job.poll() is not None:
                    del running[log]
                    note(log, job.returncode)
