"""Start the user's command, watch it, and leave no process behind."""

import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from lightning_d9m.errors import CommandError
from lightning_d9m.file_errors import explain
from lightning_d9m.launch.process_tree import ProcessTree, list_children, subreaper_enabled
from lightning_d9m.text import escape, quote

_TICK_SECONDS = 0.25
_GRACE_SECONDS = 5.0
# What ends by itself a moment after the command (a pool's helper, say) was not left behind.
_SETTLE_SECONDS = 1.0
_TAIL_LINES = 20
_TAIL_BYTES = 64 * 1024
_TAIL_WIDTH = 200
_NAMES = 3
# Sequences of a terminal: colours, movements of the cursor, titles.
_ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\^_])")


def run_watched(
    command: Sequence[str],
    *,
    environment: Mapping[str, str],
    log: Path,
    timeout: float | None,
    tick: Callable[[float], None],
    killed_when: Callable[[], bool] = lambda: False,
) -> None:
    """Run ``command`` to its end; its output goes to ``log``.

    When this process is asked to end meanwhile (SIGINT, SIGTERM, SIGHUP), it ends the command
    first.

    Args:
        command: The program and its words.
        environment: All variables of the new process.
        log: File that receives standard output and standard error, interleaved.
        timeout: Seconds after which the command counts as hanging; None waits for ever.
        tick: Called a few times a second with the seconds that have passed.
        killed_when: Whether the command is to be killed, if it has not killed itself; asked a few
            times a second and at its end. Then it is no failure.

    Raises:
        CommandError: When the command does not start, fails, or outlasts ``timeout``. All of its
            processes have then been ended.
    """
    words = describe_command(command)
    status, left = _watch(
        command,
        environment,
        log,
        partial(_wait, timeout=timeout, tick=tick, killed_when=killed_when),
    )
    if left:
        print(f"d9m: {_describe_left(left)}", file=sys.stderr)
    if status is None:
        raise CommandError(
            f"The command {words} was still running after {timeout:g} s and was ended. Allow it "
            f"more with --timeout, or see where it hangs in {log}.{_tail(log)}"
        )
    if status != 0:
        cause = f"signal {_name_signal(-status)}" if status < 0 else f"exit status {status}"
        raise CommandError(f"The command {words} ended with {cause}. Log: {log}.{_tail(log)}")


def describe_command(command: Sequence[str]) -> str:
    """Return a command in quotes, cut where it is long."""
    return quote(" ".join(command), _TAIL_WIDTH)


def _watch(
    command: Sequence[str],
    environment: Mapping[str, str],
    log: Path,
    wait: Callable[[ProcessTree, list[int]], int | None],
) -> tuple[int | None, dict[int, str]]:
    """Return what ``wait`` returns, and what the command left running when it had ended well."""
    others = list_children()
    with _signals_deferred() as received, subreaper_enabled() as adopted:
        family = ProcessTree(_start(command, environment, log), others, adopted)
        left: dict[int, str] = {}
        try:
            status = wait(family, received)
            if status == 0 and not family.wait(_SETTLE_SECONDS, lambda: bool(received)):
                left = family.find_descendants()
        finally:
            # The first signal asks for the end, a second one for a quick end.
            asked = max(1, len(received))
            family.end(_GRACE_SECONDS, lambda: len(received) > asked)
    return status, left


def _start(
    command: Sequence[str], environment: Mapping[str, str], log: Path
) -> "subprocess.Popen[bytes]":
    try:
        output = log.open("wb")
    except OSError as error:
        raise CommandError(f"The log {log} cannot be made: {explain(error)}") from error
    with output:
        try:
            return subprocess.Popen(
                command,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            cause = getattr(error, "strerror", None) or error
            advice = (
                f"Start a script with its interpreter: python {command[0]}."
                if command[0].endswith(".py")
                else "Give a program that is on PATH, or the path of one that may be executed."
            )
            raise CommandError(
                f"The command {describe_command(command)} does not start: {cause}. {advice}"
            ) from error


def _wait(
    family: ProcessTree,
    received: list[int],
    *,
    timeout: float | None,
    tick: Callable[[float], None],
    killed_when: Callable[[], bool],
) -> int | None:
    """Return the exit status, or None when the command outlasted ``timeout`` or we are to end."""
    start = time.monotonic()
    while not received:
        try:
            status = family.leader.wait(_TICK_SECONDS)
        except subprocess.TimeoutExpired:
            status = None
        if killed_when():
            family.kill()
            return 0
        passed = time.monotonic() - start
        if status is not None or (timeout is not None and passed > timeout):
            return status
        tick(passed)
    return None


@contextmanager
def _signals_deferred() -> Iterator[list[int]]:
    """Keep what asks this process to end until the body is done; then do as asked.

    Yields:
        The signals that came, in order.
    """
    received: list[int] = []
    previous: dict[signal.Signals, Any] = {}

    def keep(number: int, _: object) -> None:
        received.append(number)

    # Only the main thread may set handlers, and what is ignored (nohup) stays so.
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) not in (signal.SIG_IGN, None):
                previous[number] = signal.signal(number, keep)
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        if received:
            name = _name_signal(received[0])
            with suppress(OSError):  # the terminal may be what has gone
                print(f"\nd9m: {name} came; the command was ended.", file=sys.stderr)
            signal.raise_signal(received[0])
            # Who has a handler of their own that returns is to end all the same.
            raise SystemExit(128 + received[0])


def _describe_left(left: Mapping[int, str]) -> str:
    """Return one line on processes that were still running when their command had ended."""
    names = Counter(left.values()).most_common()
    listed = ", ".join(
        escape(name) + (f" ({count})" if count > 1 else "") for name, count in names[:_NAMES]
    )
    more = f" and {len(names) - _NAMES} more names" if names[_NAMES:] else ""
    what = "1 process" if len(left) == 1 else f"{len(left)} processes"
    return f"the command left {what} running, ended now: {listed}{more}"


def _name_signal(number: int) -> str:
    """Return a signal's name; those for real-time use have only numbers."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)


def _tail(log: Path) -> str:
    """Return the last lines of a log as a terminal would show them, set off for a message."""
    try:
        with log.open("rb") as stream:
            stream.seek(max(0, log.stat().st_size - _TAIL_BYTES))
            text = stream.read().decode("utf-8", "replace")
    except OSError as error:
        return f" It cannot be read: {explain(error)}"
    # A progress bar overwrites its line again and again: what it showed last is what counts.
    shown = [line.rstrip("\r").rpartition("\r")[2] for line in text.rstrip().split("\n")]
    lines = [_printable(line) for line in shown if line.strip()][-_TAIL_LINES:]
    if not lines:
        return " It printed nothing."
    return "\nThe end of its output:\n" + "\n".join(f"  | {line}" for line in lines)


def _printable(line: str) -> str:
    """Return a line without what moves a cursor or changes colours, cut at some length."""
    line = _ESCAPE.sub("", line.expandtabs())
    line = "".join(character if character.isprintable() else "?" for character in line)
    return line if len(line) <= _TAIL_WIDTH else line[:_TAIL_WIDTH] + " ..."
