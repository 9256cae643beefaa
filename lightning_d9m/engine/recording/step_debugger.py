"""The debugger that opens before one step of a run, which ``d9m goto`` repeats up to there.

Nothing here imports torch.
"""

import functools
import importlib
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Any

from lightning_d9m.attribute_patches import replace_method
from lightning_d9m.engine.ranks.ranks import Ranks
from lightning_d9m.errors import SettingError
from lightning_d9m.program import PACKAGE_FOLDERS

# The class of each, or the module; the package ipdb is a cover of the class of IPython.
DEBUGGERS = {
    "pdb": "pdb:Pdb",
    "ipdb": "IPython.terminal.debugger:TerminalPdb",
    "debugpy": "debugpy",
}
_ADDRESS = ("127.0.0.1", 5678)


class StepDebugger:
    """A debugger for one step.

    Args:
        name: One of ``DEBUGGERS``.
        rank: The rank that runs the step in it; the others run it as usual, and wait where they
            communicate with this rank.
        reference: The ledger of the run that is repeated.
        opens_anyway: Whether to open it even if the runs differ.

    Raises:
        SettingError: If it is not installed.
    """

    def __init__(self, name: str, rank: int, reference: str, *, opens_anyway: bool = False) -> None:
        self.name, self.rank = name, rank
        self._reference, self._opens_anyway = reference, opens_anyway
        module, _, kind = DEBUGGERS[name].partition(":")
        try:
            found = importlib.import_module(module)
        except ImportError as error:
            raise SettingError(
                f"The debugger {name} is not installed in the environment of the program. Install "
                f"it with: pip install {name}. --debugger pdb needs nothing."
            ) from error
        self._kind: Any = getattr(found, kind) if kind else found

    def check_terminal(self, rank: int) -> None:
        """Raise a ``SettingError`` if this is the rank of the debugger and has no terminal."""
        if rank == self.rank and self.name != "debugpy" and not sys.stdin.isatty():
            raise SettingError(
                f"Rank {rank} cannot read from the terminal: what started its process has replaced "
                "the standard input, as multiprocessing (ddp_spawn) does. Choose another --rank, "
                "--debugger debugpy, or --trace."
            )

    def may_open(self, ranks: Ranks, ledger: Path | None) -> bool:
        """Compare the run so far, as its ledger has it, and print the result; every rank calls it.

        A process of ``d9m compare`` does it, because the comparison is not part of a training.
        """
        # Each rank has written its file up to here when the others get past this.
        ranks.raise_on_all(lambda: None)
        equal = True
        if ranks.rank == 0:
            compare = (sys.executable, "-m", "lightning_d9m", "compare")
            sys.stdout.flush()
            command = [*compare, self._reference, str(ledger)]
            equal = subprocess.run(command, check=False).returncode == 0  # noqa: S603 - ours
        return bool(ranks.gather_json(equal)[0]) or self._opens_anyway

    def attach(self, owner: Any, name: str, leave: Callable[[], None]) -> None:
        """Let the next call of a method stop at its first line; later calls are as before.

        ``leave`` is called if the user quits the debugger.
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

    def stop_in(self, frame: FrameType, leave: Callable[[], None]) -> None:
        """Stop at the next line of a frame, or of the program's that called a library's."""
        while frame.f_back and PACKAGE_FOLDERS & {*Path(frame.f_code.co_filename).parts}:
            frame = frame.f_back
        if self.name == "debugpy":
            self._wait_for_client()
        else:
            self._make(leave).set_trace(frame)

    def _make(self, leave: Callable[[], None]) -> Any:
        """Return a debugger; an exception that it raised to quit could be caught by the program."""
        # `set_quit` is what both q and the end of the input call.
        kind = type("Debugger", (self._kind,), {"set_quit": lambda _: leave()})
        # So that the first line that it shows is the user's.
        return kind(skip=["lightning_d9m.*"])

    def _wait_for_client(self) -> None:
        self._kind.listen(_ADDRESS)
        os.write(2, b"debugpy waits for a client at %s:%d.\n" % (_ADDRESS[0].encode(), _ADDRESS[1]))
        self._kind.wait_for_client()
        self._kind.breakpoint()
