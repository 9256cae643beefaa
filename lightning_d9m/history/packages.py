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
from dataclasses import replace
from pathlib import Path

from lightning_d9m.errors import CommandError, SettingError
from lightning_d9m.history.repository import CheckOut, Commit, Repository, run_git

_LIST = "requirements.txt"
_PACKAGE = re.compile(r"([A-Za-z0-9][\w.-]*)(?:\[[^\]]*\])? *(?:===?|@) *\S+")
_EDITABLE = re.compile(r"(?:-e|--editable)\b *(.*)")
_LAST_LINES = 3
_AUTHOR = ("-c", "user.name=d9m", "-c", "user.email=d9m@localhost", "-c", "commit.gpgsign=false")


class PackageHistory(Repository):
    """A repository whose commits are lists of packages."""

    noun = "package"
    side = "package list"
    equal_advice = (
        "The command must start the python of PATH, and both lists must hold lightning_d9m."
    )

    def find_commit(self, revision: str) -> Commit:
        """Return the commit that a revision names; its subject says which package it changes."""
        return replace(super().find_commit(revision), author="", date="")

    @contextmanager
    def open_checkout(self, links: Sequence[str]) -> Iterator[CheckOut]:
        """Yield a function that installs the packages of a commit.

        It returns the working folder, and variables with which a command finds their python first.
        """
        del links
        environment = self.root.with_name("environment")
        path = f"{environment / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}"

        def check_out(commit: Commit) -> tuple[Path, Mapping[str, str]]:
            run_git(self.root, "checkout", "--quiet", "--detach", commit.sha)
            install_packages(environment, self.root / _LIST)
            return Path.cwd(), {"PATH": path, "VIRTUAL_ENV": str(environment)}

        yield check_out


def install_packages(environment: Path, path: Path) -> None:
    """Install exactly what a list holds, with uv if it is on PATH, otherwise with venv and pip.

    Args:
        environment: The folder of the virtual environment; only pip makes an existing one again.
        path: The list.

    Raises:
        CommandError: If it cannot be made or filled.
    """
    python = str(environment / "bin" / "python")
    if uv := shutil.which("uv"):
        if not environment.exists():
            _run(uv, "venv", "--quiet", "--python", sys.executable, str(environment))
        _run(uv, "pip", "sync", "--quiet", "--python", python, str(path))
    else:
        _run(sys.executable, "-m", "venv", "--clear", "--without-pip", str(environment))
        pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python)
        _run(*pip, "install", "--quiet", "--no-deps", "-r", str(path))


def read_packages(path: Path) -> tuple[dict[str, str], list[str]]:
    """Return the line of each package by name, and the options, such as the URL of an index.

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
    options = []
    for full in text.splitlines():
        line = re.sub(r"(^|\s)#.*", "", full).strip()
        if line.startswith("-") and not _EDITABLE.match(line):
            options.append(line)
        elif found := _PACKAGE.match(line) or _EDITABLE.match(line):
            packages[re.sub(r"[-_.]+", "-", found[1]).lower()] = line
        elif line:
            raise SettingError(
                f"{path} holds {line!r}, not a package with its version. Give the "
                "output of pip freeze, with lines such as numpy==2.1.0."
            )
    return packages, options


@contextmanager
def open_package_history(old: Path, new: Path) -> Iterator[tuple[PackageHistory, Commit, Commit]]:
    """Yield a repository of lists, and the commits of the first and of the last.

    Raises:
        SettingError: If the lists cannot be read, or hold the same.
        CommandError: If git or the environment fails.
    """
    (before, options), (after, further) = read_packages(old), read_packages(new)
    changed = [name for name in sorted(before | after) if before.get(name) != after.get(name)]
    if not changed:
        raise SettingError(
            f"{old} and {new} hold the same packages, so none of them changed the bits. Give the "
            "output of pip freeze from before and after."
        )
    header = list(dict.fromkeys([*options, *further]))
    with tempfile.TemporaryDirectory(prefix="d9m-packages-") as name:
        folder = Path(name, "lists")
        folder.mkdir()
        run_git(folder, "init", "--quiet")
        current = dict(before)
        for package in ("", *changed):
            subject = " -> ".join(one.get(package, "nothing") for one in (before, after))
            current.pop(package, None)
            current |= {package: after[package]} if package in after else {}
            text = "\n".join([*header, *current.values(), ""])
            (folder / _LIST).write_text(text, encoding="utf-8")
            run_git(folder, "add", _LIST)
            run_git(folder, *_AUTHOR, "commit", "--quiet", "--no-verify", "-m", subject)
        history = PackageHistory(folder)
        good = replace(history.find_commit(f"HEAD~{len(changed)}"), subject=old.name)
        yield history, good, replace(history.find_commit("HEAD"), subject=new.name)


def _run(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        said = " ".join((done.stderr or done.stdout).strip().splitlines()[-_LAST_LINES:])
        raise CommandError(f"The packages cannot be installed: {said} ({' '.join(words)})")
    return done.stdout
