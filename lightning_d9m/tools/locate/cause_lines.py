"""Lines of a program, found by the rules of ``d9m scan``, that may explain a cause."""

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

from lightning_d9m.tools.lint.rules import Finding
from lightning_d9m.tools.lint.scanner import scan_file
from lightning_d9m.tools.lint.source import SourceError, list_imports, read_python

# A folder of scripts is small; one that holds an environment would take minutes to scan.
_MOST_FILES = 500
# Of draws, then of orders, which may also decide values: of labels that a set numbers, say.
_ANY = tuple(f"D9M{number}" for number in (201, 203, 204, 207, 301, 302, 303, 305, 306))
# By the kind of the cause.
_RULES = {
    **dict.fromkeys(("data", "initial weights", "inputs", "value from outside torch"), _ANY),
    "random numbers": ("D9M204",),
}


def find_cause_lines(command: Sequence[str], cause: str) -> list[Finding]:
    """Scan the program of a command and the modules beside it that it imports.

    Returns:
        The findings of the rules that explain the cause, the likeliest first; then what explains
        others and is certain or has one right answer. An empty cause has these alone.
    """
    program = find_program(command)
    if program is None:
        return []
    scans = [scan_file(str(path), frozenset(_ANY)) for path in _list_modules(program)]
    found = [finding for scan in scans for finding in scan.findings]
    found = [
        one for one in found if explains(one.rule, cause) or one.edit or one.certainty == "certain"
    ]
    order = (*_RULES.get(cause, ()), *_ANY)
    return sorted(found, key=lambda f: (order.index(f.rule), f.certainty != "certain"))


def explains(rule: str, cause: str) -> bool:
    """Return whether what a rule finds can be a cause of this kind."""
    return rule in _RULES.get(cause, ())


def find_program(command: Sequence[str]) -> Path | None:
    """Return the Python file that a command runs, or None.

    >>> find_program(["no-such-program", "--fast"])
    """
    for flag, word in zip(("", *command), command, strict=False):
        candidates = [Path(word)]
        if flag == "-m":
            stem = Path(*word.split("."))
            candidates = [stem.with_suffix(".py"), stem / "__main__.py"]
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
        try:
            tree = ast.parse(read_python(path.read_bytes()).text)
        except (OSError, SourceError, SyntaxError, ValueError, RecursionError, MemoryError):
            continue  # the scan reports such a file
        for name in sorted(set(list_imports(tree))):
            parts = name.split(".")
            for folder in (program.parent, path.parent):
                for end in range(1, len(parts) + 1):
                    stem = folder.joinpath(*parts[:end])
                    found = (stem.with_suffix(".py"), stem / "__init__.py")
                    new = [file for file in found if file not in seen and file.is_file()]
                    waiting += new
                    seen.update(new)
