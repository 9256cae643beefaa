"""The files that a scan reads."""

import os
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from lightning_d9m.errors import SettingError

SUFFIXES = (".py", ".pyw", ".ipynb")
SKIPPED_FOLDERS = frozenset(
    {
        ".git",
        ".hg",
        ".svn",
        ".venv",
        "venv",
        ".tox",
        ".nox",
        ".eggs",
        "__pycache__",
        "node_modules",
        "site-packages",
        "dist-packages",
        ".mypy_cache",
        ".pytest_cache",
        ".ruff_cache",
        ".ipynb_checkpoints",
        ".hypothesis",
    }
)
"""Names of folders that do not hold source of the project."""
# A work tree on a slow disk is scanned whole rather than not at all.
_GIT_SECONDS = 30


@dataclass(frozen=True)
class SourceFile:
    """A file to scan, or a path with the reason why it is not scanned.

    Attributes:
        path: The path as given, or below the given folder.
        problem: The reason why it is not scanned; empty for a file to scan.
    """

    path: str
    problem: str = ""


def list_files(
    paths: Sequence[Path], exclude: Iterable[str] = (), *, ignored: bool = False
) -> Iterator[SourceFile]:
    """Yield each file once, in the order of the given paths and then of names.

    Args:
        paths: Files, scanned whatever their names are, and folders.
        exclude: Globs that a path below a folder, or a name, must not match.
        ignored: Whether to yield files that git ignores, too.

    Raises:
        SettingError: If a path does not exist, or is neither a file nor a folder.
    """
    patterns = tuple(exclude)
    for path in paths:
        if not os.path.lexists(path):
            raise SettingError(f"{str(path)!r} does not exist. Give a file or a folder to scan.")
        if path.exists() and not path.is_file() and not path.is_dir():
            raise SettingError(f"{str(path)!r} is neither a file nor a folder. Give one of these.")
    seen: set[tuple[int, int]] = set()
    for path in paths:
        if path.is_dir():
            skipped = frozenset() if ignored else find_ignored(path)
            yield from _walk(str(path), "", patterns, seen, (), skipped)
        elif _is_new(str(path), seen):
            yield SourceFile(str(path))


def find_ignored(folder: Path) -> frozenset[str]:
    """Return the paths below a folder that git ignores; folders stand for all that they hold.

    Nothing is ignored if git is not installed, if the folder is not in a work tree, or if it is
    itself ignored: then it was named on purpose.
    """
    command = ["git", "ls-files", "--others", "--ignored", "--exclude-standard", "--directory"]
    try:
        done = subprocess.run(  # noqa: S603 - a fixed command
            [*command, "-z"], cwd=folder, capture_output=True, check=False, timeout=_GIT_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired):
        return frozenset()
    names = {os.fsdecode(name).rstrip("/") for name in done.stdout.split(b"\0") if name}
    return frozenset() if done.returncode or "." in names else frozenset(names)


def _walk(  # noqa: C901 - one case for each kind of entry
    folder: str,
    inner: str,
    patterns: tuple[str, ...],
    seen: set[tuple[int, int]],
    above: tuple[tuple[int, int], ...],
    skipped: frozenset[str],
) -> Iterator[SourceFile]:
    try:
        state = Path(folder).stat()
        key = (state.st_dev, state.st_ino)
        if key in above:
            yield SourceFile(
                folder, "This link leads to a folder that contains it, so it is not followed."
            )
            return
        if key in seen:
            return
        seen.add(key)
        with os.scandir(folder) as listed:
            entries = sorted(listed, key=lambda entry: entry.name)
    except OSError as error:
        yield SourceFile(folder, f"The folder cannot be read: {error.strerror or error}.")
        return
    folders = []
    for entry in entries:
        below = f"{inner}{entry.name}"
        if below in skipped or any(
            fnmatch(below, pattern) or fnmatch(entry.name, pattern) for pattern in patterns
        ):
            continue
        try:
            is_folder, is_file = entry.is_dir(), entry.is_file()
        except OSError:
            is_folder, is_file = False, False
        if is_folder:
            virtual = Path(entry.path, "pyvenv.cfg").exists()
            if entry.name not in SKIPPED_FOLDERS and not virtual:
                folders.append((entry.path, f"{below}/"))
        elif (
            entry.name.endswith(SUFFIXES)
            and (is_file or entry.is_symlink())
            and _is_new(entry.path, seen)
        ):
            yield SourceFile(entry.path)
    for path, below in folders:
        yield from _walk(path, below, patterns, seen, (*above, key), skipped)


def _is_new(path: str, seen: set[tuple[int, int]]) -> bool:
    """Return whether a file is new, or cannot be read and must be reported."""
    try:
        state = Path(path).stat()
    except OSError:
        return True
    key = (state.st_dev, state.st_ino)
    if key in seen:
        return False
    seen.add(key)
    return True
