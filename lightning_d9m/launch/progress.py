"""What ``d9m repeat`` says while a run goes on."""

import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_d9m.text import pluralize

if TYPE_CHECKING:
    from typing_extensions import Self

_EPOCH = b'"moment":"epoch"'
_BLOCK = 2**20


class EpochCounter:
    """Counts the epochs in the ledgers of one run, and reads no byte of them twice.

    Args:
        folder: The folder in which the run makes its ledgers.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._offsets: dict[Path, int] = {}
        self._epochs = 0

    def count(self) -> int:
        """Return how many epochs have been recorded so far, of all fits."""
        for path in self._folder.glob("fit-*/rank-0.jsonl"):
            self._read_on(path)
        return self._epochs

    def _read_on(self, path: Path) -> None:
        offset = self._offsets.get(path, 0)
        with suppress(OSError), path.open("rb") as stream:
            # Progress is a courtesy: who reads the ledger later says what is wrong with it.
            stream.seek(offset)
            while len(block := stream.read(_BLOCK)) >= len(_EPOCH):
                self._epochs += block.count(_EPOCH)
                # The end may be the first part of a match: it is read again with what follows it.
                offset += len(block) - (len(_EPOCH) - 1)
                self._offsets[path] = offset
                stream.seek(offset)


class RunProgress:
    """One line for each run, with seconds and epochs while it goes on when a person watches.

    Args:
        title: Which run it is.
        folder: The folder in which the run makes its ledgers.
    """

    def __init__(self, title: str, folder: Path) -> None:
        self._title = title
        self._counter = EpochCounter(folder)
        self._live = sys.stderr.isatty()

    def __enter__(self) -> "Self":
        self._show("started", end="" if self._live else "\n")
        return self

    def tick(self, seconds: float) -> None:
        """Say how far the run is; called a few times a second."""
        if self._live:
            self._show(f"{seconds:.0f} s, {self._epochs()}", end="")

    def __exit__(self, kind: object, *_: object) -> None:
        ending = "done" if kind is None else "stopped"
        self._show(f"{ending}, {self._epochs()}", end="\n")

    def _epochs(self) -> str:
        return pluralize(self._counter.count(), "epoch")

    def _show(self, text: str, *, end: str) -> None:
        start, rest = ("\r", "\x1b[K") if self._live else ("", "")
        print(f"{start}{self._title}: {text}{rest}", end=end, file=sys.stderr, flush=True)
