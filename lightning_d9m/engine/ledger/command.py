"""The program of a run, as the header of its ledger has it: its command, and its source in git."""

import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from shlex import join

from lightning_d9m.engine.ledger.format.records import Scalar

MAX_COMMAND = 1024
# A repository whose files git cannot look through in this time is left out, so that no start waits.
_GIT_SECONDS = 2.0
# Without locks, because a status that refreshes the index would make a git of the user fail at the
# same time. Without a monitor, which git would start as a daemon that outlives the training.
_GIT = ("git", "--no-optional-locks", "-c", "core.fsmonitor=false")
# A hook of git sets these; they would name another repository.
_GIT_VARIABLES = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_COMMON_DIR")

# The entry of a header's program with the last calls that seeded torch before the fit.
SEEDED = "seeded"
# The setting that says where the steps of a program without an optimizer of torch begin.
BEGINS = "steps_begin"
# The entry of a run that stops at a step on purpose: a segment of another run.
SEGMENT = "segment"


def capture_program() -> dict[str, Scalar]:
    """Return the command of this process, and commit and state of its source, as the header has.

    The repository is read once for a process. The source is that of the program, or if it is an
    installed one, such as pytest, that of the working folder.

    Returns:
        ``command``; ``git.commit`` and ``git.dirty`` (whether tracked files or the program differ
        from the commit) if there is a repository.
    """
    main = sys.modules.get("__main__")
    specification = getattr(main, "__spec__", None)
    words = sys.argv[:1]
    if specification is not None:
        words = ["-m", specification.name.removesuffix(".__main__")]
    command = join(["python", *words, *sys.argv[1:]])[:MAX_COMMAND]
    script = Path(getattr(main, "__file__", None) or "")
    prefixes = {Path(prefix).absolute() for prefix in (sys.prefix, sys.base_prefix)}
    if script.is_file() and prefixes.isdisjoint(script.absolute().parents):
        git = _read_git(script.absolute().parent, script.name)
    else:
        git = _read_git(Path.cwd(), None)
    return {"command": command, **git}


@cache
def _read_git(folder: Path, script: str | None) -> dict[str, Scalar]:
    folder = folder.resolve()
    # Starting git takes longer than looking.
    if not any(os.path.lexists(parent / ".git") for parent in (folder, *folder.parents)):
        return {}
    status = _run_git(folder, "status", "--porcelain=v2", "--branch", "-uno", "--ignore-submodules")
    if status is None:
        return {}
    lines = status.splitlines()
    commits = [line.split()[-1] for line in lines if line.startswith("# branch.oid ")]
    if not commits or commits[0] == "(initial)":
        return {}
    dirty = any(not line.startswith("#") for line in lines)
    # `status -uno` does not look at untracked files, which may be many; the program may be one.
    if script is not None and not dirty:
        dirty = _run_git(folder, "ls-files", "--error-unmatch", "--", script) is None
    return {"git.commit": commits[0], "git.dirty": dirty}


def make_git_environment() -> dict[str, str]:
    """Return the variables for a git that finds the repository of its folder."""
    return {name: text for name, text in os.environ.items() if name not in _GIT_VARIABLES}


def _run_git(folder: Path, *words: str) -> str | None:
    """Return the output of git; None if it fails, is absent or takes too long."""
    try:
        done = subprocess.run(  # noqa: S603 - fixed words and a file name
            [*_GIT, *words],
            cwd=folder,
            env=make_git_environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=True,
            timeout=_GIT_SECONDS,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode(errors="replace")
