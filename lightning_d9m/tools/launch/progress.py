"""Progress on standard error: a line that is rewritten in place, and one for each run."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_d9m.text import pluralize

if TYPE_CHECKING:
    from typing_extensions import Self


class StatusLine:
    """A context in which ``update`` shows a line; it is erased at the end.

    ``live`` says whether it is shown: on a terminal.
    """

    def __init__(self) -> None:
        self.live = sys.stderr.isatty()

    def __enter__(self) -> "Self":
        if self.live:
            from rich.console import Console
            from rich.live import Live

            console = Console(stderr=True, highlight=False)
            # It is redrawn by `update` only: a thread that redraws could hold locks during a fork.
            self._display = Live(console=console, auto_refresh=False, transient=True)
            self._display.start()
        return self

    def update(self, text: str) -> None:
        """Show a line, cut at the width of the terminal."""
        if self.live:
            from rich.text import Text

            line = Text(text, no_wrap=True, overflow="ellipsis")
            self._display.update(line, refresh=True)

    def __exit__(self, kind: object, *_: object) -> None:
        if self.live:
            self._display.stop()


@contextmanager
def show_progress(what: str) -> Iterator[Callable[[int], None] | None]:
    """Yield a function that shows how many items ("records compared"); None without a terminal."""
    with StatusLine() as line:
        yield (lambda done: line.update(f"{done:,} {what}")) if line.live else None


def describe_left(seconds: float) -> str:
    """Return how long something still takes; empty if it is not known.

    >>> describe_left(40.4), describe_left(190), describe_left(0)
    (', about 40 s left', ', about 3 min left', '')
    """
    if not seconds:
        return ""
    minutes = seconds / 60
    about = f"{seconds:.0f} s" if minutes < _LONG else f"{minutes:.0f} min"
    return f", about {about} left"


_LONG = 2  # minutes
# A record is compact JSON whose fields have a fixed order, so these bytes find it without a parser.
_EPOCH = b'"moment":"epoch"'


class RunProgress(StatusLine):
    """One line for each run; on a terminal it shows seconds and epochs while the run lasts.

    Args:
        title: Name of the run.
        folder: The folder to which the run writes its ledgers.
        expected: Seconds that the run is expected to take; 0 if nothing is known.
        later: The number of runs that follow.
    """

    def __init__(self, title: str, folder: Path, expected: float = 0.0, later: int = 0) -> None:
        super().__init__()
        self._title = title
        self._expected, self._later = expected, later
        self._folder = folder
        self._offsets: dict[Path, int] = {}
        self._epochs = 0

    def __enter__(self) -> "Self":
        super().__enter__()
        started = f"{self._title}: started{self._left(0.0)}"
        (self.update if self.live else self._print)(started)
        return self

    def tick(self, seconds: float) -> None:
        """Update the line; called a few times a second."""
        if self.live:
            self.update(self._describe(f"{seconds:.0f} s") + self._left(seconds))

    def _left(self, seconds: float) -> str:
        return describe_left(max(0.0, self._expected - seconds) + self._expected * self._later)

    def __exit__(self, kind: object, *_: object) -> None:
        super().__exit__(kind)
        self._print(self._describe("done" if kind is None else "stopped"))

    def _describe(self, state: str) -> str:
        count = self.count_epochs()  # a loop of the user's may record none
        epochs = f", {pluralize(count, 'epoch')}" if count else ""
        return f"{self._title}: {state}{epochs}"

    def count_epochs(self) -> int:
        """Return the number of epochs that all fits have recorded so far."""
        for path in self._folder.glob("fit-*/rank-0.jsonl"):
            # The reader of the ledger reports errors. Each byte is read once: with probes of each
            # step a ledger is long, and this runs a few times a second.
            with suppress(OSError), path.open("rb") as stream:
                stream.seek(self._offsets.get(path, 0))
                # The training may be in the middle of the last line.
                lines, _, rest = stream.read().rpartition(b"\n")
                self._epochs += lines.count(_EPOCH)
                self._offsets[path] = stream.tell() - len(rest)
        return self._epochs

    def _print(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)
