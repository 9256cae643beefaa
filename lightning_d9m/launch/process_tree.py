"""The processes that descend from a command: find and end them, in whatever session they run.

Killing a process group reaches neither a daemon nor a process in a new session. On Linux this
process becomes the parent of orphans among its descendants (PR_SET_CHILD_SUBREAPER, prctl(2)), so
that all of them are found below it. On other systems only the command's group is reached.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import psutil

_SET_SUBREAPER, _GET_SUBREAPER = 36, 37  # linux/prctl.h
_POLL_SECONDS = 0.02
# A killed process may wait for a disk for an unlimited time.
_MOST_KILL_SECONDS = 10.0


@contextmanager
def subreaper_enabled() -> Iterator[bool]:
    """Adopt orphaned descendants; yield whether the system supports it."""
    before = _exchange_subreaper(1)
    try:
        yield before is not None
    finally:
        if before is not None:
            _exchange_subreaper(before)


@dataclass(frozen=True)
class ProcessTree:
    """The processes of a command and all their descendants.

    Attributes:
        leaders: The command's processes; each leads its process group.
        others: Children that this process had before; they and their descendants are left alone.
        is_subreaper: Whether orphans become children of this process.
    """

    leaders: "list[subprocess.Popen[bytes]]"
    others: frozenset[int]
    is_subreaper: bool

    def find_descendants(self) -> dict[int, str]:
        """Return ``{pid: name}`` of the running descendants of the leaders. Reap exited ones."""
        found: dict[int, str] = {}
        leaders = {leader.pid for leader in self.leaders}
        for child in psutil.Process().children() if self.is_subreaper else ():
            if child.pid in self.others:
                continue
            with suppress(psutil.NoSuchProcess):
                for process in (child, *child.children(recursive=True)):
                    with suppress(psutil.NoSuchProcess):
                        if process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
                            found[process.pid] = process.name()
                        elif process is child and child.pid not in leaders:
                            with suppress(ChildProcessError):
                                os.waitpid(child.pid, os.WNOHANG)
        return {pid: name for pid, name in found.items() if pid not in leaders}

    def is_alive(self) -> bool:
        """Return whether a leader or a descendant still runs."""
        # All are polled, so that each that has ended is reaped.
        running = [leader for leader in self.leaders if leader.poll() is None]
        if running or self.find_descendants():
            return True
        return not self.is_subreaper and any(_group_is_alive(entry.pid) for entry in self.leaders)

    def wait(self, seconds: float, terminate_now: Callable[[], bool]) -> bool:
        """Wait until all have ended, at most ``seconds`` or until ``terminate_now()``.

        Returns:
            Whether all have ended.
        """
        start = time.monotonic()
        while self.is_alive():
            if terminate_now() or time.monotonic() - start >= seconds:
                return False
            time.sleep(_POLL_SECONDS)
        return True

    def end(self, grace: float, terminate_now: Callable[[], bool]) -> None:
        """Send SIGTERM, and SIGKILL after ``grace`` seconds or as soon as ``terminate_now()``."""
        self._signal(signal.SIGTERM)
        if not self.wait(grace, terminate_now):
            self.kill()

    def kill(self) -> None:
        """Send SIGKILL until all have ended."""
        start = time.monotonic()
        # Repeat: a process may start another one between the search and the signal.
        while self.is_alive() and time.monotonic() - start < _MOST_KILL_SECONDS:
            self._signal(signal.SIGKILL)
            time.sleep(_POLL_SECONDS)

    def _signal(self, number: signal.Signals) -> None:
        # After a leader is reaped its PID can be reused, unless its process group still exists.
        for leader in self.leaders:
            if leader.poll() is None or not self.is_subreaper:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(leader.pid, number)
        for pid in self.find_descendants():
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)


def list_children() -> frozenset[int]:
    """Return the PIDs of this process's children."""
    return frozenset(child.pid for child in psutil.Process().children())


def _exchange_subreaper(value: int) -> int | None:
    """Set the attribute and return its earlier value; None if the system does not have it."""
    if not sys.platform.startswith("linux"):
        return None
    before = ctypes.c_int()
    try:
        library = ctypes.CDLL(None, use_errno=True)
        if library.prctl(_GET_SUBREAPER, ctypes.byref(before), 0, 0, 0) != 0:
            return None
        return None if library.prctl(_SET_SUBREAPER, value, 0, 0, 0) != 0 else before.value
    except (OSError, AttributeError):
        return None


def _group_is_alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return sys.platform.startswith("linux")  # macOS raises it for zombies
    return True
