"""The program's own code as opposed to that of the framework: torch, Lightning and this package."""

import linecache
import sys
from types import FrameType
from typing import NamedTuple

LIGHTNING = frozenset({
    *("lightning", "lightning_fabric", "lightning_utilities", "pytorch_lightning", "lightning_d9m"),
})  # fmt: skip
"""The packages of Lightning, and this one."""
FRAMEWORK = LIGHTNING | {"torch", "torchdata", "torchmetrics"}
"""The packages whose objects and lines are not the program's, wherever they are installed."""
# Torch calls its own functions through theirs, as those that it deprecates.
_WRAPPERS = ("contextlib", "functools", "typing_extensions")
# Debian's Python has the second name.
PACKAGE_FOLDERS = frozenset({"site-packages", "dist-packages"})


def is_of_framework(name: str | None) -> bool:
    """Return whether a module is of the framework, by its name."""
    return str(name).partition(".")[0] in FRAMEWORK


class Line(NamedTuple):
    """A line that runs: its file, number and function, and its text."""

    file: str
    number: int
    function: str
    text: str


def find_line(end: str | None = None) -> Line | None:
    """Return the innermost line that is not of the framework; None if there is none.

    ``end`` is the name of a function around which no line is looked for.
    """
    # `traceback.extract_stack` reads the text of every frame, which takes too long where each
    # operation is looked at.
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - the stack has no cheaper view
    while frame is not None:
        file, scope = frame.f_code.co_filename, frame.f_globals
        name = str(scope.get("__name__"))
        # torch's generated code names no module, or one whose namespace is another.
        module = sys.modules.get(name)
        known = module is None or vars(module) is scope or name == "__main__"
        is_imported = known and "__name__" in scope
        foreign = is_of_framework(name) or name in _WRAPPERS or file.startswith("<")
        # Not for other frames: `linecache` reads a whole file for one line.
        text = "" if foreign or not is_imported else linecache.getline(file, frame.f_lineno, scope)
        if text.strip():
            return Line(file, frame.f_lineno, frame.f_code.co_name, text.strip())
        if frame.f_code.co_name == end:
            return None
        frame = frame.f_back
    return None
