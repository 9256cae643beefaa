"""Lines of the program that the rules of ``d9m scan`` report and that may explain a cause."""

import ast
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path

from lightning_d9m.lint.files import SourceFile
from lightning_d9m.lint.programs import list_imports
from lightning_d9m.lint.rules import Finding
from lightning_d9m.lint.scanner import scan_file
from lightning_d9m.lint.source import SourceError, read_python

_MOST_FILES = 500
_ORDER = ("D9M301", "D9M302", "D9M303", "D9M304", "D9M305")
_DRAWS = ("D9M201", "D9M202", "D9M203", "D9M204", "D9M206", "D9M207", "D9M208")
# By the kind of the cause. An order may also decide values: of labels that a set numbers, say.
_RULES = {
    "data": (*_DRAWS, *_ORDER),
    "initial weights": (*_DRAWS, *_ORDER),
    "random numbers": ("D9M202", "D9M204"),
    "uninitialized memory": ("D9M107",),
}
_ANY = (*_DRAWS, *_ORDER, "D9M107")


def find_cause_lines(
    command: Sequence[str], cause: str, *, order_only: bool = False
) -> list[Finding]:
    """Scan the program of a command and the modules beside it that it imports.

    Returns:
        The findings of the rules that explain the cause, the likeliest first; then what is certain
        and explains others. An empty cause has these alone.
    """
    program = find_program(command)
    rules = _RULES.get(cause, ())
    if program is None:
        return []
    torch_version = version("torch")
    scans = [
        scan_file(SourceFile(str(path)), torch_version, frozenset((*rules, *_ANY)))
        for path in _list_modules(program)
    ]
    found = [finding for scan in scans for finding in scan.findings]
    found = [one for one in found if one.rule in rules or one.certainty == "certain"]
    if order_only:
        found = [finding for finding in found if finding.rule in _ORDER] or found
    order = (*rules, *_ANY)
    return sorted(found, key=lambda f: (order.index(f.rule), f.certainty != "certain"))


def explains(rule: str, cause: str) -> bool:
    """Return whether what a rule finds can be a cause of this kind."""
    return rule in _RULES.get(cause, ())


def find_program(command: Sequence[str]) -> Path | None:
    """Return the Python file that a command runs, or None.

    >>> find_program(["no-such-program", "--fast"])
    """
    for flag, word in zip(("", *command), command, strict=False):
        stem = Path(*word.split(".")) if flag == "-m" else None
        candidates = (
            [Path(word)] if stem is None else [stem.with_suffix(".py"), stem / "__main__.py"]
        )
        for path in candidates:
            if path.suffix == ".py" and path.is_file():
                return path
    return None


def _list_modules(program: Path) -> Iterator[Path]:
    """Yield the program and, transitively, the files that it imports from its folder."""
    waiting, seen = [program], {program}
    while waiting and len(seen) <= _MOST_FILES:
        path = waiting.pop(0)
        yield path
        for name in _read_imports(path):
            parts = name.split(".")
            for folder in (program.parent, path.parent):
                for end in range(1, len(parts) + 1):
                    stem = folder.joinpath(*parts[:end])
                    found = (stem.with_suffix(".py"), stem / "__init__.py")
                    new = [file for file in found if file not in seen and file.is_file()]
                    waiting += new
                    seen.update(new)


def _read_imports(path: Path) -> list[str]:
    try:
        return sorted(set(list_imports(ast.parse(read_python(path.read_bytes()).text))))
    except (OSError, SourceError, SyntaxError, ValueError, RecursionError, MemoryError):
        return []  # the scan reports such a file
