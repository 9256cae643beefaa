"""The files that a scan reads."""

import os
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from lightning_d9m.errors import SettingError

SUFFIXES = (".py", ".pyw", ".ipynb")
SKIPPED_FOLDERS = frozenset({
    ".git", ".hg", ".svn", ".venv", "venv", ".tox", ".nox", ".eggs", "__pycache__", "node_modules",
    "site-packages", "dist-packages", ".mypy_cache", ".pytest_cache", ".ruff_cache",
    ".ipynb_checkpoints", ".hypothesis",
})  # fmt: skip
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
        if not _is_new(path, seen):
            continue
        if path.is_dir():
            skipped = frozenset() if ignored else find_ignored(path)
            yield from _walk(str(path), patterns, skipped, seen)
        else:
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


def _walk(
    top: str, patterns: tuple[str, ...], skipped: frozenset[str], seen: set[tuple[int, int]]
) -> Iterator[SourceFile]:
    """Yield the files below a folder; a link to a folder that was seen is not followed again."""
    failed: list[OSError] = []
    for folder, folders, names in os.walk(top, onerror=failed.append, followlinks=True):
        inner = folder.removeprefix(top).lstrip(os.sep)
        kept = [
            Path(folder, name)
            for name in sorted((*folders, *names))
            if (below := str(Path(inner, name))) not in skipped
            and not any(fnmatch(text, pattern) for text in (below, name) for pattern in patterns)
        ]
        folders[:] = [
            path.name
            for path in kept
            if path.name in folders
            and path.name not in SKIPPED_FOLDERS
            and not Path(path, "pyvenv.cfg").exists()
            and _is_new(path, seen)
        ]
        for path in kept:
            is_source = path.name in names and path.name.endswith(SUFFIXES)
            if is_source and (path.is_file() or path.is_symlink()) and _is_new(path, seen):
                yield SourceFile(f"{folder.rstrip(os.sep)}{os.sep}{path.name}")
    for error in failed:
        problem = f"The folder cannot be read: {error.strerror or error}."
        yield SourceFile(str(error.filename), problem)


def _is_new(path: Path, seen: set[tuple[int, int]]) -> bool:
    """Return whether a path is new, or cannot be read and must be reported."""
    try:
        state = path.stat()
    except OSError:
        return True
    key = (state.st_dev, state.st_ino)
    if key in seen:
        return False
    seen.add(key)
    return True
