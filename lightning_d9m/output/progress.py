"""The progress of a comparison on standard error."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lightning_d9m.launch.status_line import StatusLine


@contextmanager
def show_progress(what: str) -> Iterator[Callable[[int], None] | None]:
    """Yield a function that shows how many items are done; None without a terminal.

    Args:
        what: The items, as in ``"records compared"``.
    """
    with StatusLine() as line:
        yield (lambda done: line.update(f"{done:,} {what}")) if line.live else None
