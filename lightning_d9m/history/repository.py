"""A git repository, and a worktree in which its commits are checked out one after another.

``git rev-list --bisect-all`` orders the commits in question: it knows merges. The user's folder,
index and branches stay as they are.
"""

import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from lightning_d9m.errors import CommandError, SettingError

_FORMAT = "%H%x00%s%x00%an%x00%as"
# Variables that would point git at the user's folder instead of the worktree.
_LOCATIONS = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX")


@dataclass(frozen=True)
class Commit:
    """A commit.

    Attributes:
        sha: Its full name.
        subject: The first line of its message.
        author: The author's name; empty for a list of packages.
        date: The day on which it was written, as ``YYYY-MM-DD``.
    """

    sha: str
    subject: str
    author: str
    date: str

    @property
    def short(self) -> str:
        """The first ten digits of its name; the subject of a list of packages."""
        return self.sha[:10] if self.author else self.subject


# Returns the folder in which a commit trains, and further variables of the training.
CheckOut: TypeAlias = Callable[[Commit], tuple[Path, Mapping[str, str]]]


class Repository:
    """The repository that holds a folder.

    Args:
        folder: Any folder in its working tree.

    Attributes:
        root: The top of the working tree.
        noun: What is searched for.
        side: What is trained.
        equal_advice: A reason for which the bad training may be equal to the good one.

    Raises:
        SettingError: If the folder is not in a git repository, or git is missing.
    """

    noun = "commit"
    side = "commit"
    equal_advice = (
        "If the command imports the project from where it is installed (pip install -e), each "
        "commit trains the same code: set PYTHONPATH=."
    )

    def __init__(self, folder: Path) -> None:
        try:
            top = run_git(folder, "rev-parse", "--show-toplevel")
        except CommandError as error:
            raise SettingError(
                f"The folder {folder} is not in the working tree of a git repository. Run d9m "
                f"bisect where the training's commits are. ({error})"
            ) from None
        self.root = Path(top.strip())

    def find_commit(self, revision: str) -> Commit:
        """Return the commit that a revision names.

        Raises:
            SettingError: If there is none.
        """
        words = ("log", "-1", f"--format={_FORMAT}", "--end-of-options", revision)
        try:
            return Commit(*run_git(self.root, *words).rstrip("\n").split("\0"))
        except CommandError:
            raise SettingError(
                f"{revision!r} does not name a commit of {self.root}. Give a hash, a tag, a branch "
                "or an expression such as HEAD~20."
            ) from None

    def list_commits(self, last: Commit, *words: str) -> list[str]:
        """Return the names of a commit and its ancestors, as options of ``git rev-list`` say."""
        lines = run_git(self.root, "rev-list", last.sha, *words).splitlines()
        return [line.partition(" ")[0] for line in lines]

    def show(self, commit: Commit) -> str:
        """Return what a commit changed, as a patch below a list of files."""
        return run_git(
            self.root, "show", "--format=", "--stat", "--patch", "--no-color", commit.sha
        )

    @contextmanager
    def open_checkout(self, links: Sequence[str]) -> Iterator[CheckOut]:
        """Yield a function that checks out a commit in a worktree, which is removed at the end.

        It removes the files that an earlier training left, ignored ones too, and returns the folder
        in the worktree that stands for the working folder, and further variables of a training.

        Args:
            links: Paths below the root that git does not track, such as a folder of data; each
                commit finds a symbolic link to the user's.

        Raises:
            SettingError: If a path does not exist.
        """
        for link in links:
            if not (self.root / link).exists():
                raise SettingError(f"--link is {link!r}, and {self.root / link} does not exist.")
        with tempfile.TemporaryDirectory(prefix="d9m-bisect-") as parent:
            top = Path(parent, self.root.name)
            folder = top / Path.cwd().resolve().relative_to(self.root.resolve())

            def check_out(commit: Commit) -> tuple[Path, Mapping[str, str]]:
                run_git(top, "clean", "-ffdxq")
                run_git(top, "checkout", "--quiet", "--force", "--detach", commit.sha)
                for path in (top / link for link in links if not (top / link).exists()):
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.symlink_to(self.root / path.relative_to(top))
                if not folder.is_dir():
                    raise CommandError(f"The commit does not have the folder {folder}.")
                return folder, {}

            run_git(self.root, "worktree", "add", "--detach", "--quiet", str(top), "HEAD")
            try:
                yield check_out
            finally:
                run_git(self.root, "worktree", "remove", "--force", str(top))


def run_git(folder: Path, *words: str) -> str:
    """Run git in a folder and return what it printed.

    Raises:
        CommandError: If it fails.
    """
    variables = {name: text for name, text in os.environ.items() if name not in _LOCATIONS}
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *words],
            env={**variables, "LC_ALL": "C"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
    except OSError as error:
        raise CommandError(f"git cannot be started: {error.strerror}. Install git.") from error
    if done.returncode:
        raise CommandError(f"The git command `git {' '.join(words)}` failed: {done.stderr.strip()}")
    return done.stdout
