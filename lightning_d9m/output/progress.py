"""A progress line on standard error, shown by rich only on a terminal."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def show_progress(what: str) -> Iterator[Callable[[int], None] | None]:
    """Yield a function that shows how many items are done; None if nobody watches.

    The line is erased at the end.

    Args:
        what: What is counted, as in ``"records compared"``.
    """
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console

    console = Console(stderr=True, highlight=False)
    with console.status("") as status:
        yield lambda done: status.update(f"{done:,} {what}")
