"""The debugger that opens before one step of a run that ``d9m goto`` repeats.

``d9m goto`` starts the program on the user's terminal and compares its ledger with the run's when
the step is reached. The two processes share a folder: rank 0 makes ``ARRIVED`` there, and reads
from the pipe ``ANSWER`` whether the debugger may open. A pipe, so that the training does not wait
for a ``d9m goto`` that has ended. Nothing here imports torch.
"""

import functools
import importlib
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Any

from lightning_d9m.attribute_patches import replace_method
from lightning_d9m.engine.ranks.ranks import Ranks
from lightning_d9m.errors import SettingError

# The class of each, or the module; ipdb is a cover of that of IPython.
DEBUGGERS = {
    "pdb": "pdb:Pdb",
    "ipdb": "IPython.terminal.debugger:TerminalPdb",
    "debugpy": "debugpy",
}
ARRIVED = "arrived"
ANSWER = "answer"
ENTER = "enter"
# The debuggers step over these modules, so that the first line that they show is the user's.
_SKIPPED = ["lightning_d9m.*"]
_PACKAGES = {"site-packages", "dist-packages"}
_ADDRESS = ("127.0.0.1", 5678)


class StepDebugger:
    """A debugger for one step.

    Args:
        name: One of ``DEBUGGERS``.
        rank: The rank that runs the step in it; the others run it as usual, and wait where they
            communicate with this rank.
        folder: The folder that is shared with ``d9m goto``.

    Attributes:
        has_arrived: Whether the step was reached.

    Raises:
        SettingError: If it is not installed.
    """

    def __init__(self, name: str, rank: int, folder: Path) -> None:
        self.name, self.rank, self._folder = name, rank, folder
        self.has_arrived = False
        module, _, kind = DEBUGGERS[name].partition(":")
        try:
            found = importlib.import_module(module)
            self._kind: Any = getattr(found, kind) if kind else found
        except ImportError as error:
            raise SettingError(
                f"The debugger {name} is not installed in the environment of the program. Install "
                f"it with: pip install {name}. --debugger pdb needs nothing."
            ) from error

    def check_terminal(self, rank: int) -> None:
        """Raise a ``SettingError`` if this is the rank of the debugger and has no terminal."""
        if rank == self.rank and self.name != "debugpy" and not sys.stdin.isatty():
            raise SettingError(
                f"Rank {rank} cannot read from the terminal: what started its process has replaced "
                "the standard input, as multiprocessing (ddp_spawn) does. Choose another --rank, "
                "--debugger debugpy, or --trace."
            )

    def arrive(self, ranks: Ranks) -> bool:
        """Wait for the comparison of the run up to here; every rank calls this.

        Returns:
            Whether the step may run.
        """
        self.has_arrived = True
        ranks.raise_on_all(lambda: None)  # the ledgers of all ranks are complete up to here
        answer = ""
        if ranks.rank == 0:
            # Opened without waiting for a writer, which may have ended; reading waits for one.
            pipe = os.open(self._folder / ANSWER, os.O_RDONLY | os.O_NONBLOCK)
            os.set_blocking(pipe, True)
            with os.fdopen(pipe, encoding="utf-8") as stream:
                # Only now: what is written to a pipe that nobody has open is lost.
                (self._folder / ARRIVED).touch()
                answer = stream.read()
        return bool(ranks.gather_json(answer)[0] == ENTER)

    def attach(self, owner: Any, name: str, leave: Callable[[str], None]) -> None:
        """Let the next call of a method stop at its first line; later calls are as before.

        ``leave`` is called with a reason if the user quits the debugger.
        """
        method, replaced = getattr(owner, name), ExitStack()

        @functools.wraps(method)
        def debug(*args: Any, **words: Any) -> Any:
            replaced.close()
            if self.name == "debugpy":
                self._wait_for_client()
                return method(*args, **words)  # it stops here: step into the method
            return self._make(leave).runcall(method, *args, **words)

        replace_method(replaced, owner, name, debug)

    def stop_in(self, frame: FrameType, leave: Callable[[str], None]) -> None:
        """Stop at the next line of a frame, or of the program's that called a library's."""
        while frame.f_back is not None and _PACKAGES & {*Path(frame.f_code.co_filename).parts}:
            frame = frame.f_back
        if self.name == "debugpy":
            self._wait_for_client()
        else:
            self._make(leave).set_trace(frame)

    def _make(self, leave: Callable[[str], None]) -> Any:
        """Return a debugger; an exception that it raised to quit could be caught by the program."""

        class Debugger(self._kind):  # type: ignore[misc] # the class is chosen by name
            def set_quit(self) -> None:
                leave("you left the debugger")

        return Debugger(skip=_SKIPPED)

    def _wait_for_client(self) -> None:
        self._kind.listen(_ADDRESS)
        place = ":".join(map(str, _ADDRESS))
        sys.stderr.write(f"debugpy waits for a client at {place}.\n")
        self._kind.wait_for_client()
        self._kind.breakpoint()
