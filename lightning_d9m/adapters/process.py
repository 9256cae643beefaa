"""Start the user's command, watch it, and leave no process behind."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from lightning_d9m.errors import CommandError

_TICK_SECONDS = 0.25
_GRACE_SECONDS = 5.0
_TAIL_LINES = 20
_TAIL_BYTES = 64 * 1024


def run_watched(
    command: Sequence[str],
    *,
    environment: Mapping[str, str],
    log: Path,
    timeout: float | None,
    tick: Callable[[float], None],
) -> None:
    """Run ``command`` to its end; its output goes to ``log``.

    Args:
        command: The program and its words.
        environment: All variables of the new process.
        log: File that receives standard output and standard error, interleaved.
        timeout: Seconds after which the command counts as hanging; None waits for ever.
        tick: Called a few times a second with the seconds that have passed.

    Raises:
        CommandError: When the command does not start, fails, or outlasts ``timeout``. All of its
            processes have then been ended.
    """
    words = " ".join(command)
    with log.open("wb") as output:
        try:
            process = subprocess.Popen(
                command,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise CommandError(
                f"The command {words!r} does not start: {error.strerror or error}. Give a program "
                "that is on PATH, and its words, after `--`."
            ) from error
        try:
            status = _wait(process, timeout, tick)
        finally:
            _end_group(process)
    if status is None:
        raise CommandError(
            f"The command {words!r} was still running after {timeout:g} s and was ended. Allow it "
            f"more with --timeout, or see where it hangs in {log}.{_tail(log)}"
        )
    if status != 0:
        cause = f"signal {_name_signal(-status)}" if status < 0 else f"exit status {status}"
        raise CommandError(f"The command {words!r} ended with {cause}. Log: {log}.{_tail(log)}")


def _wait(
    process: "subprocess.Popen[bytes]", timeout: float | None, tick: Callable[[float], None]
) -> int | None:
    """Return the exit status, or None when the command outlasted ``timeout``."""
    start = time.monotonic()
    while True:
        try:
            return process.wait(_TICK_SECONDS)
        except subprocess.TimeoutExpired:
            passed = time.monotonic() - start
            if timeout is not None and passed > timeout:
                return None
            tick(passed)


def _end_group(process: "subprocess.Popen[bytes]") -> None:
    """End every process that the command started and left behind: politely, then surely."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        # The group outlives its leader while a child still runs, and is gone when none does.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        if number == signal.SIGTERM and process.poll() is None:
            with suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE_SECONDS)
    process.wait()


def _name_signal(number: int) -> str:
    """Return a signal's name; those for real-time use have only numbers."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)


def _tail(log: Path) -> str:
    """Return the last lines of a log, set off for an error message."""
    with log.open("rb") as stream:
        stream.seek(max(0, log.stat().st_size - _TAIL_BYTES))
        text = stream.read().decode("utf-8", "replace")
    lines = text.replace("\r", "\n").rstrip().splitlines()[-_TAIL_LINES:]
    if not lines:
        return " It printed nothing."
    return "\nThe end of its output:\n" + "\n".join(f"  | {line}" for line in lines)
