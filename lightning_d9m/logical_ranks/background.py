"""A thread that finishes exchanges while the backward pass still runs."""

from collections.abc import Callable
from queue import SimpleQueue
from threading import Event, Thread

import torch


class Job:
    """A call on the thread."""

    def __init__(self, func: Callable[[], None]) -> None:
        self._func = func
        self._done = Event()
        self._error: BaseException | None = None

    def run(self) -> None:
        """Call the function, and keep its error."""
        try:
            with torch.no_grad():
                self._func()
        except BaseException as error:  # noqa: BLE001 - `wait` raises it
            self._error = error
        finally:
            self._done.set()

    def wait(self) -> None:
        """Wait for the end of the call, and raise its error."""
        self._done.wait()
        if self._error is not None:
            raise self._error


class BackgroundThread:
    """Calls functions one after the other on a thread.

    The thread is a daemon: the interpreter does not wait for an exchange with a lost process.
    """

    def __init__(self) -> None:
        self._queue: SimpleQueue[Job | None] = SimpleQueue()
        # This flag of the processor is that of a thread, and it changes bits.
        flushes = flushes_subnormal_numbers()
        self._thread = Thread(target=self._run, args=(flushes,), name="d9m-exchange", daemon=True)
        self._thread.start()

    def submit(self, func: Callable[[], None]) -> Job:
        """Let the thread call a function."""
        job = Job(func)
        self._queue.put(job)
        return job

    def close(self) -> None:
        """Let the thread end after the calls that were submitted."""
        self._queue.put(None)

    def _run(self, flushes: bool) -> None:
        torch.set_flush_denormal(flushes)
        while (job := self._queue.get()) is not None:
            job.run()


def flushes_subnormal_numbers() -> bool:
    """Return whether this thread adds subnormal numbers as zeros."""
    return torch.tensor([2.0**-149]).add(0.0).item() == 0.0
