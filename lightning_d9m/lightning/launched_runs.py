"""Runs in processes that Lightning forks or spawns, as under ``ddp_spawn`` and ``ddp_notebook``.

Lightning calls no hook in the process that starts the others, and the others end with the run. So
its launcher is wrapped: each process takes over the session and the number of fits of the process
that started it, and that one gets what the run of rank 0 left in the callback.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lightning_d9m.control.session import (
    InheritedSession,
    capture_session,
    session_inherited,
    set_fits,
)

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

    from lightning_d9m.lightning.callback import DeterminismCallback


@dataclass(frozen=True)
class LaunchedRun:
    """A run that new processes call."""

    trainer: "Trainer"
    run: Callable[..., object]
    callback: "DeterminismCallback"
    session: InheritedSession

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[object, int, dict[str, Any]]:
        """Run; return the result, the number of fits, and what the run left in the callback."""
        with session_inherited(self.session):
            try:
                result = self.run(*args, **kwargs)
            except BaseException as error:
                # Lightning calls `on_exception` only in the process that started this one.
                self.callback.on_exception(self.trainer, self.trainer.lightning_module, error)
                raise
            return result, capture_session().fits, self.callback.capture_summary()


def launch_run(
    trainer: "Trainer",
    run: Callable[..., object],
    start: Callable[[Callable[..., object]], Any],
    callbacks: "Sequence[DeterminismCallback]",
) -> object:
    """Start the processes of a run, and return its result.

    ``run`` is the method of the Trainer that runs. ``start`` starts processes that call its
    argument, and returns what it returned on rank 0. The first of the callbacks serves the run.
    """
    session = capture_session()
    fits = session.fits + (trainer.state.fn == "fit")  # a fit that fails counts
    with ExitStack() as stack:
        for callback in callbacks:
            stack.callback(callback.early_variables.restore)
        callbacks[0].early_variables.set()  # the processes must find them
        try:
            result, fits, summary = start(LaunchedRun(trainer, run, callbacks[0], session))
        finally:
            set_fits(fits)
    callbacks[0].restore_summary(summary)
    return result
