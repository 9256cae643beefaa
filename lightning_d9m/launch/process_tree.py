"""All processes that descend from a command, found and ended, whatever session they moved to.

A group kill reaches neither a daemon nor a process in a session of its own. On Linux this process
asks to become the parent of every orphan among its descendants (PR_SET_CHILD_SUBREAPER, prctl(2)),
so that /proc shows them all below it. Elsewhere the command's group is all that is reached.
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
from pathlib import Path

_SET_SUBREAPER, _GET_SUBREAPER = 36, 37  # linux/prctl.h
_POLL_SECONDS = 0.02
# A killed process that waits for a disk cannot be waited for for ever.
_PATIENCE_SECONDS = 10.0


@contextmanager
def subreaper_enabled() -> Iterator[bool]:
    """Be the parent of descendants that lose theirs; yields whether the system lets us."""
    before = _exchange_subreaper(1)
    try:
        yield before is not None
    finally:
        if before is not None:
            _exchange_subreaper(before)


@dataclass(frozen=True)
class ProcessTree:
    """A command and all that descends from it.

    Attributes:
        leader: The command's process, which leads a group of its own.
        others: Children that this process had before; they and theirs are none of the family.
        adopted: Whether orphans come to this process.
    """

    leader: "subprocess.Popen[bytes]"
    others: frozenset[int]
    adopted: bool

    def find_descendants(self) -> dict[int, str]:
        """Return the name of each descendant that still runs, by its id; the dead are buried."""
        processes = _read_processes() if self.adopted else {}
        children: dict[int, list[int]] = {}
        for pid, (parent, _, _) in processes.items():
            children.setdefault(parent, []).append(pid)
        found = {}
        queue = [pid for pid in children.get(os.getpid(), ()) if pid not in self.others]
        while queue:
            pid = queue.pop()
            queue += children.get(pid, ())
            parent, state, name = processes[pid]
            if pid == self.leader.pid:
                continue
            if state not in "ZX":
                found[pid] = name
            elif parent == os.getpid():
                with suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
        return found

    def lives(self) -> bool:
        """Return whether any of them still runs."""
        if self.leader.poll() is None or self.find_descendants():
            return True
        return not self.adopted and _group_lives(self.leader.pid)

    def wait(self, seconds: float, hurried: Callable[[], bool]) -> bool:
        """Wait for their end, at most ``seconds`` or until ``hurried``; True when none lives."""
        start = time.monotonic()
        while self.lives():
            if hurried() or time.monotonic() - start >= seconds:
                return False
            time.sleep(_POLL_SECONDS)
        return True

    def end(self, grace: float, hurried: Callable[[], bool]) -> None:
        """End them all: politely, and after ``grace`` seconds, or when ``hurried``, surely."""
        self._signal(signal.SIGTERM)
        if not self.wait(grace, hurried):
            self.kill()

    def kill(self) -> None:
        """End them all now."""
        start = time.monotonic()
        # Again and again: one of them may start another between the look and the kill.
        while self.lives() and time.monotonic() - start < _PATIENCE_SECONDS:
            self._signal(signal.SIGKILL)
            time.sleep(_POLL_SECONDS)

    def _signal(self, number: signal.Signals) -> None:
        # Once the leader is buried its number may be another's, unless its group still needs it.
        if self.leader.poll() is None or not self.adopted:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.leader.pid, number)
        for pid in self.find_descendants():
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)


def list_children() -> frozenset[int]:
    """Return the ids of this process's children."""
    me = os.getpid()
    return frozenset(pid for pid, (parent, _, _) in _read_processes().items() if parent == me)


def _exchange_subreaper(value: int) -> int | None:
    """Set the attribute; return what it was, or None where there is none."""
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


def _read_processes() -> dict[int, tuple[int, str, str]]:
    """Return parent, state and name of every process; nothing where there is no /proc."""
    processes = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = entry.read_text(errors="replace")
        except OSError:
            continue  # it has ended
        # The name is in brackets, and may hold brackets and blanks itself.
        head, _, rest = text.rpartition(")")
        pid, _, name = head.partition(" (")
        state, parent = rest.split()[:2]
        processes[int(pid)] = (int(parent), state, name)
    return processes


def _group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return sys.platform.startswith("linux")  # macOS says so of zombies
    return True
