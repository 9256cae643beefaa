"""The version of the package, and the releases of others."""

import re

__version__ = "0.1.0"


def parse_release(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a version, or nothing if it begins with none.

    >>> parse_release("2.11.0a0+git1"), parse_release("")
    ((2, 11), ())
    """
    numbers = re.match(r"(\d+)\.(\d+)", version)
    return tuple(map(int, numbers.groups())) if numbers else ()
