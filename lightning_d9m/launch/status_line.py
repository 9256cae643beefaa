"""One line on standard error that is rewritten in place, on a terminal only."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Self


class StatusLine:
    """A context in which ``update`` shows a line; it is erased at the end.

    Args:
        quiet: Whether to show nothing even on a terminal.

    Attributes:
        live: Whether the line is shown.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        self.live = not quiet and sys.stderr.isatty()

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

    def __exit__(self, *_: object) -> None:
        if self.live:
            self._display.stop()


@contextmanager
def show_progress(what: str) -> Iterator[Callable[[int], None] | None]:
    """Yield a function that shows how many items ("records compared"); None without a terminal."""
    with StatusLine() as line:
        yield (lambda done: line.update(f"{done:,} {what}")) if line.live else None
