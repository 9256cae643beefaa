"""A progress line on stderr."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_shown() -> Iterator[Callable[[int], None] | None]:
    """Give what shows to a person how far a comparison is, wiped away in the end."""
    if not sys.stderr.isatty():
        yield None
        return
    try:
        yield _show_progress
    finally:
        print("\r\033[K", end="", file=sys.stderr)


def _show_progress(records: int) -> None:
    print(f"\r{records:,} records compared", end="", file=sys.stderr, flush=True)
