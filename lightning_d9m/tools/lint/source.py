"""The files that a scan reads: which they are, and their source text.

The cells of a notebook are one module.
"""

import ast
import io
import json
import os
import re
import subprocess
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

from lightning_d9m.engine.ledger.command import make_git_environment
from lightning_d9m.errors import SettingError

SUFFIXES = (".py", ".pyw", ".ipynb")
# Folders that do not hold source of the project, besides hidden ones and virtual environments.
_SKIPPED = {"venv", "__pycache__", "node_modules", "site-packages", "dist-packages"}
# A work tree on a slow disk is scanned whole rather than not at all.
_GIT_SECONDS = 30
# What takes the place of a line of IPython's: the first pattern that matches decides.
_MAGICS = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"^(\s*)%(?:time|prun|memit)\s+(?=\S)", r"\1"),  # they run the rest, which is Python
        (r"^(\s*)(?:%{1,2}|!|\?)(?!=).*", r"\1pass"),
        (r"^\s*[\w.]+\?{1,2}\s*$", "pass"),
        (r"^(\s*[\w.,\s\[\]'\"]+=\s*)[%!].*$", r"\1None"),
    )
)
_PYTHON_MAGICS = {"time", "timeit", "capture", "prun", "memit", "python", "python3", "mprun"}


def list_files(paths: Sequence[Path], exclude: Iterable[str] = ()) -> dict[str, str]:
    """Return each file once, in the order of the given paths and then of names.

    For each there is the reason why it is not scanned; empty for a file to scan.

    Args:
        paths: Files, scanned whatever their names are, and folders.
        exclude: Globs that a path below a folder, or a name, must not match.

    Raises:
        SettingError: If a path does not exist, or is neither a file nor a folder.
    """
    patterns = tuple(exclude)
    for path in paths:
        if not os.path.lexists(path):
            raise SettingError(f"{str(path)!r} does not exist. Give a file or a folder to scan.")
        # A pipe or a device may block the process that opens it.
        if path.exists() and not path.is_file() and not path.is_dir():
            raise SettingError(f"{str(path)!r} is neither a file nor a folder. Give one of these.")
    files: dict[str, tuple[str, str]] = {}
    for path in paths:
        found: Iterable[tuple[str, str]] = [(str(path), "")]
        if path.is_dir():
            found = _walk(str(path), patterns, find_ignored(path))
        for entry in found:
            # A link and its file are one, and paths may overlap.
            files.setdefault(os.path.realpath(entry[0]), entry)
    return dict(files.values())


def find_ignored(folder: Path) -> frozenset[str]:
    """Return the paths below a folder that git ignores; folders stand for all that they hold.

    Nothing is ignored if git is not installed, if the folder is not in a work tree, or if it is
    itself ignored: then it was named on purpose.
    """
    # git decides, as its rules are in several files and in the user's settings.
    command = ["git", "ls-files", "--others", "--ignored", "--exclude-standard", "--directory"]
    try:
        done = subprocess.run(
            [*command, "-z"],
            cwd=folder,
            env=make_git_environment(),
            capture_output=True,
            check=False,
            timeout=_GIT_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired):
        return frozenset()
    names = {os.fsdecode(name).rstrip("/") for name in done.stdout.split(b"\0") if name}
    return frozenset() if done.returncode or "." in names else frozenset(names)


def _walk(
    top: str, patterns: tuple[str, ...], skipped: frozenset[str]
) -> Iterator[tuple[str, str]]:
    """Yield the files below a folder; links to folders are not followed."""
    failed: list[OSError] = []
    for folder, folders, names in os.walk(top, onerror=failed.append):
        inner = Path(folder).relative_to(top)
        kept = {
            name
            for name in (*folders, *names)
            if (below := str(inner / name)) not in skipped
            and not any(fnmatch(text, pattern) for text in (below, name) for pattern in patterns)
        }
        # os.walk descends into what is left in this list, in its order.
        folders[:] = sorted(
            name
            for name in kept.intersection(folders) - _SKIPPED
            if not name.startswith(".") and not Path(folder, name, "pyvenv.cfg").exists()
        )
        for name in sorted(kept.intersection(names)):
            path = Path(folder, name)
            if name.endswith(SUFFIXES) and (path.is_file() or path.is_symlink()):
                yield os.path.join(folder, name), ""  # noqa: PTH118 - keeps a leading dot
    for error in failed:
        yield str(error.filename), f"The folder cannot be read: {error.strerror or error}."


class SourceError(Exception):
    """A file cannot be scanned; the message is one sentence."""


@dataclass
class Source:
    r"""The text of one module and the origin of its lines.

    Attributes:
        text: With ``\n`` between lines.
        cells: For each line of a notebook: the cell, and the line in it.
        problems: (line, cell, reason) of each cell that is left out because it does not parse.
    """

    text: str
    cells: list[tuple[int, int]] = field(default_factory=list)
    problems: list[tuple[int, int, str]] = field(default_factory=list)


def read_source(path: Path) -> Source:
    """Read a Python file or a notebook.

    Raises:
        OSError: If it cannot be read.
        SourceError: If it cannot be decoded, or does not hold source.
    """
    data = path.read_bytes()
    return read_notebook(data) if path.suffix == ".ipynb" else read_python(data)


def read_python(data: bytes) -> Source:
    """Decode a Python file by its declared encoding (PEP 263).

    Raises:
        SourceError: If it cannot be decoded, or is not text.
    """
    if b"\0" in data:
        raise SourceError("It holds null bytes, so it is not Python source.")
    try:
        # It reads a BOM and the comment with the encoding, as Python does.
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        text = data.decode(encoding)
    except SyntaxError as error:
        raise SourceError(f"Its encoding cannot be read: {error.msg}.") from error
    except (UnicodeDecodeError, LookupError) as error:
        raise SourceError(f"It cannot be decoded: {error}.") from error
    return Source(_with_newlines(text))


def read_notebook(data: bytes) -> Source:
    """Read the code of a notebook; blanks replace magics, so that positions stay the same.

    Raises:
        SourceError: If it is not a notebook.
    """
    try:
        notebook = json.loads(data.decode("utf-8-sig"))
        # Cells of text and of raw data are left out, but count in the numbers of cells.
        codes = [
            (number, _with_newlines("".join(cell["source"])))
            for number, cell in enumerate(notebook["cells"], 1)
            if cell["cell_type"] == "code"
        ]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise SourceError(f"It is not a valid notebook: {error!r}.") from error
    source = Source("")
    lines: list[str] = []
    for number, code in codes:
        kept, problem = _clean_cell(code)
        if problem is not None:
            # One cell that does not parse must not hide the others: cells are one module only after
            # that.
            source.problems.append((problem[0], number, problem[1]))
            continue
        rows = kept.split("\n")
        lines += rows
        source.cells += [(number, row) for row in range(1, len(rows) + 1)]
    source.text = "\n".join(lines)
    return source


def parse(text: str) -> ast.Module | tuple[int, str]:
    """Return the tree of a text, or the line and the reason why it does not parse."""
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError) as error:
        reason = error.msg if isinstance(error, SyntaxError) else str(error)
        return getattr(error, "lineno", None) or 1, f"It does not parse: {reason}."
    except (RecursionError, MemoryError):
        return 1, "It is nested too deeply to be parsed."


def list_imports(tree: ast.AST) -> Iterator[str]:
    """Yield the dotted names of all imports of a module, including those within functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module or ''}.{alias.name}" for alias in node.names)


def _with_newlines(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text


def _clean_cell(code: str) -> tuple[str, tuple[int, str] | None]:
    """Return a cell's Python code, or the line and reason of its syntax error."""
    first = code.lstrip("\n").partition("\n")[0]
    if first.startswith("%%"):
        magic = first[2:].split()
        # A cell in another language, such as %%bash or %%html.
        if not magic or magic[0] not in _PYTHON_MAGICS:
            return "\n" * code.count("\n"), None
        code = code.replace(first, "", 1)
    # A line such as `x = a\n% b` is Python in a cell that parses, and a magic in one that does not.
    if isinstance(parse(code), tuple):
        code = "\n".join(map(_clean_line, code.split("\n")))
    parsed = parse(code)
    return ("", parsed) if isinstance(parsed, tuple) else (code, None)


def _clean_line(line: str) -> str:
    changed = (pattern.sub(replacement, line, count=1) for pattern, replacement in _MAGICS)
    return next((text for text in changed if text != line), line)
