"""The search for the package whose new version changed the bits of a training.

The packages that differ between two lists become commits of a temporary repository, one package
each, in the order of their names. The search is then that for a commit; each training runs in an
environment with the packages of its commit.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from lightning_d9m.errors import CommandError, SettingError
from lightning_d9m.history.bisection import Bisection
from lightning_d9m.history.repository import Commit, Repository, Worktree, run_git

_LIST = "requirements.txt"
_PACKAGE = re.compile(r"([A-Za-z0-9][\w.-]*)(?:\[[^\]]*\])? *(?:===?|@) *\S+")
# Where packages come from; it holds for every list.
_SOURCE = re.compile(
    r"(?:-i|-f|--index-url|--extra-index-url|--find-links|--no-index|--trusted-host|--pre)\b"
)
_EDITABLE = re.compile(r"(?:-e|--editable)\b")
_LAST_LINES = 3


class PackageHistory(Repository):
    """A repository whose commits are lists of packages."""

    def find_commit(self, revision: str) -> Commit:
        """Return the commit that a revision names; its subject says which package it changes."""
        return replace(super().find_commit(revision), author="", date="")

    def show(self, commit: Commit) -> str:
        """Return nothing: the subject says what changed."""
        del commit
        return ""


@dataclass(kw_only=True)
class PackageBisection(Bisection):
    """Trains with the packages of a commit, in the user's folder.

    Attributes:
        environment: The environment that the packages are installed into.
    """

    noun = "package"
    side = "package list"
    equal_advice = (
        "The command must start the python of PATH, and both lists must hold lightning_d9m."
    )
    environment: "Environment"

    def prepare(self, worktree: Worktree) -> tuple[Path, Mapping[str, str]]:
        """Install the packages of the commit; return the user's folder and their variables."""
        self.environment.install(worktree.folder / _LIST)
        return Path.cwd(), self.environment.variables


class Environment:
    """A virtual environment, made and filled with uv if it is on PATH, otherwise with pip.

    Args:
        folder: Its folder, which does not exist.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._uv = shutil.which("uv")

    @property
    def variables(self) -> Mapping[str, str]:
        """The variables with which a command finds the environment's python first."""
        path = f"{self._folder / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}"
        return {"PATH": path, "VIRTUAL_ENV": str(self._folder)}

    def install(self, path: Path) -> None:
        """Install exactly what a list holds; only uv does so without beginning again.

        Raises:
            CommandError: If it cannot be made or filled.
        """
        python = str(self._folder / "bin" / "python")
        if self._uv:
            if not self._folder.exists():
                _run(self._uv, "venv", "--quiet", "--python", sys.executable, str(self._folder))
            _run(self._uv, "pip", "sync", "--quiet", "--python", python, str(path))
        else:
            _run(sys.executable, "-m", "venv", "--clear", "--without-pip", str(self._folder))
            pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python)
            _run(*pip, "install", "--quiet", "--no-deps", "-r", str(path))


def read_packages(path: Path) -> tuple[dict[str, str], list[str]]:
    """Return the line of each package by name, and the lines that say where packages come from.

    Raises:
        SettingError: If the file cannot be read, or is not a list as `pip freeze` prints it.
    """
    try:
        text = path.read_text(encoding="utf-8").replace("\\\n", " ")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError(
            f"The list of packages {path} cannot be read: {error}. Give two files with the output "
            "of pip freeze."
        ) from error
    packages: dict[str, str] = {}
    sources = []
    for full in text.splitlines():
        line = re.sub(r"(^|\s)#.*", "", full).strip()
        if not line:
            continue
        if _SOURCE.match(line):
            sources.append(_resolve_folder(line, path.parent))
        elif _EDITABLE.match(line):
            packages[line] = line
        elif found := _PACKAGE.match(line):
            packages[_normalize(found[1])] = line
        else:
            raise SettingError(
                f"{path} holds {line!r}, not a package with its version. Give the "
                "output of pip freeze, with lines such as numpy==2.1.0."
            )
    return packages, sources


def _resolve_folder(line: str, folder: Path) -> str:
    """Return an option with the whole path of its folder; uv and pip differ on relative ones."""
    option, _, place = line.replace("=", " ", 1).partition(" ")
    found = folder / place.strip()
    return f"{option} {found.resolve()}" if place and found.is_dir() else line


def _normalize(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@contextmanager
def open_package_history(
    old: Path, new: Path
) -> Iterator[tuple[PackageHistory, Commit, Commit, Environment]]:
    """Yield a repository of lists, the commits of the first and of the last, and an environment.

    Raises:
        SettingError: If the lists cannot be read, or hold the same.
        CommandError: If git or the environment fails.
    """
    (before, sources), (after, further) = read_packages(old), read_packages(new)
    changed = [name for name in sorted(before | after) if before.get(name) != after.get(name)]
    if not changed:
        raise SettingError(
            f"{old} and {new} hold the same packages, so none of them changed the bits. Give the "
            "output of pip freeze from before and after."
        )
    header = list(dict.fromkeys([*sources, *further]))
    with tempfile.TemporaryDirectory(prefix="d9m-packages-") as name:
        folder = Path(name, "lists")
        folder.mkdir()
        run_git(folder, "init", "--quiet")
        _commit(folder, [*header, *before.values()], old.name)
        current = dict(before)
        for package in changed:
            lines = [one.get(package, "nothing") for one in (before, after)]
            current.pop(package, None)
            current |= {package: after[package]} if package in after else {}
            _commit(folder, [*header, *current.values()], " -> ".join(lines))
        history = PackageHistory(folder)
        good = history.find_commit(f"HEAD~{len(changed)}")
        bad = replace(history.find_commit("HEAD"), subject=new.name)
        yield history, good, bad, Environment(Path(name, "environment"))


def _commit(folder: Path, lines: Sequence[str], subject: str) -> None:
    (folder / _LIST).write_text("\n".join([*lines, ""]), encoding="utf-8")
    run_git(folder, "add", _LIST)
    who = ("-c", "user.name=d9m", "-c", "user.email=d9m@localhost", "-c", "commit.gpgsign=false")
    run_git(folder, *who, "commit", "--quiet", "--no-verify", "-m", subject)


def _run(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        said = " ".join((done.stderr or done.stdout).strip().splitlines()[-_LAST_LINES:])
        raise CommandError(f"The packages cannot be installed: {said} ({' '.join(words)})")
    return done.stdout
