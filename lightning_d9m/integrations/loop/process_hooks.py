"""Hooks that last as long as a process, and the ledger that ends with it."""

import os
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing import parent_process
from multiprocessing.util import Finalize

from lightning_d9m.attribute_patches import AttributePatches
from lightning_d9m.errors import D9mError

# After the finalizers of multiprocessing itself, of which the last has -100.
_LAST = -1000


class ProcessHooks:
    """Hooks of a process, and their ledger, of which a forked process writes nothing."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._process = os.getpid()
        self._hooks, self._patches = ExitStack(), AttributePatches()
        # First, so that they are undone last, after the ledger is finished.
        self._hooks.callback(self._patches.undo)

    def remove(self) -> None:
        """Finish the ledger and remove the hooks."""
        with self._hooks:
            self.finish()

    def finish(self) -> None:
        """Finish the ledger that is open, if this process opened it."""
        if self._process == os.getpid():
            self._end_ledger()

    def _end_ledger(self) -> None:
        raise NotImplementedError

    def _is_forked(self) -> bool:
        """Return whether this process is another one than before, whose ledger is the parent's."""
        if self._process == os.getpid():
            return False
        self._process = os.getpid()
        self._finish_at_exit()  # multiprocessing forgets the finalizers of the parent
        return True

    def _finish_at_exit(self) -> None:
        # multiprocessing calls only those finalizers at exit that have a priority.
        # Unlike `atexit`, called at the end of a process of `multiprocessing`, too.
        self._hooks.callback(Finalize(None, self._finish_process, exitpriority=0).cancel)

    def _finish_process(self) -> None:
        """Finish the ledger at the end of the process; a difference there is its exit status."""
        try:
            self.finish()
        except D9mError:
            # Python ignores the errors of functions that it calls at exit.
            traceback.print_exc()
            # After the processes that the program has started, which it ends then.
            Finalize(None, _fail_process, exitpriority=_LAST)


class _Failure:
    def __del__(self, leave: Callable[[int], object] = os._exit) -> None:
        leave(1)  # a default, because the names of this module exist no longer


def _fail_process() -> None:
    """Let the exit status of this process be 1, when all else has ended."""
    if parent_process() is not None:
        raise SystemExit(1)  # which multiprocessing takes for the status of its process
    # Python asks nothing for the status, but clears `sys` after all other modules: what the program
    # has written is in its files, and what it has registered with `atexit` has run.
    vars(sys)["_lightning_d9m_failure"] = _Failure()
