"""The files that a scan reads."""

import os
import subprocess
from collections.abc import Iterable, Iterator, Sequence
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
        if path.exists() and not path.is_file() and not path.is_dir():
            raise SettingError(f"{str(path)!r} is neither a file nor a folder. Give one of these.")
    files: dict[str, str] = {}
    seen: set[str] = set()
    for path in paths:
        found: Iterable[tuple[str, str]] = [(str(path), "")]
        if path.is_dir():
            found = _walk(str(path), patterns, find_ignored(path))
        for name, problem in found:
            real = os.path.realpath(name)
            if real not in seen:
                seen.add(real)
                files[name] = problem
    return files


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
        folders[:] = sorted(
            name
            for name in kept.intersection(folders) - SKIPPED_FOLDERS
            if not Path(folder, name, "pyvenv.cfg").exists()
        )
        for name in sorted(kept.intersection(names)):
            path = Path(folder, name)
            if name.endswith(SUFFIXES) and (path.is_file() or path.is_symlink()):
                yield os.path.join(folder, name), ""  # noqa: PTH118 - keeps a leading dot
    for error in failed:
        yield str(error.filename), f"The folder cannot be read: {error.strerror or error}."
