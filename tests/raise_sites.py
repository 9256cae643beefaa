"""Note in a file which places of the package that make an error the tests have executed.

``pytest --raise-sites=FILE`` adds to it, as do several runs, xdist's workers, the processes that
tests fork, and the programs of ``forking_python``. Other programs of a test are not seen.
``raise_sites.py FILE`` lists the places that are not in the file; its exit status is 1 if there are
any.
"""

import ast
import sys
from pathlib import Path

from lightning_d9m import errors

PACKAGE = Path(errors.__file__).parent
CLASSES = {
    name
    for name, value in vars(errors).items()
    if isinstance(value, type) and issubclass(value, errors.D9mError)
}


def find_sites(source, path):
    """Return (path, first line, last line) of each call that makes one of our errors."""
    return [
        (path, node.lineno, node.end_lineno)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and getattr(node.func, "id", getattr(node.func, "attr", "")) in CLASSES
    ]


def note_sites(file):
    """Note in a file, from now on, each place that makes one of our errors; return the undoing."""
    seen = set()
    before = vars(errors.D9mError).get("__new__")

    def note(kind, *_, **__):
        frame = sys._getframe(1)
        place = f"{frame.f_code.co_filename}\t{frame.f_lineno}\n"
        if place not in seen:
            seen.add(place)
            with open(file, "a") as writer:  # noqa: PTH123 - a test may replace Path.open
                writer.write(place)
        return super(errors.D9mError, kind).__new__(kind, *_)

    def undo():
        if before:
            errors.D9mError.__new__ = before
        else:
            del errors.D9mError.__new__

    errors.D9mError.__new__ = note
    return undo


def find_unexecuted(file):
    """Return the sites of the package of which no line was noted."""
    lines = (line.split("\t") for line in file.read_text().splitlines())
    executed = {(path, int(line)) for path, line in lines}
    return [
        f"{path.relative_to(PACKAGE)}:{first}"
        for module in sorted(PACKAGE.rglob("*.py"))
        for path, first, last in find_sites(module.read_text(), module)
        if not any((str(path), line) in executed for line in range(first, last + 1))
    ]


if __name__ == "__main__":
    missing = find_unexecuted(Path(sys.argv[1]))
    if missing:
        sys.exit("\n".join([f"errors that no test made: {len(missing)}", *missing]))
