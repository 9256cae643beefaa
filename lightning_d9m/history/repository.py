"""A git repository, and a worktree in which its commits are checked out one after another.

``git bisect`` chooses the commit to test next: it knows merges and skipped commits. Its state
belongs to the worktree, so that the user's folder, index and branches stay as they are.
"""

import os
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from lightning_d9m.errors import CommandError, SettingError

_FORMAT = "%H%x00%s%x00%an%x00%as"
_FIRST_BAD = re.compile(r"^([0-9a-f]{40,64}) is the first bad commit", re.MULTILINE)
_ONLY_SKIPPED = "There are only 'skip'ped commits left"
_COMMIT_LINE = re.compile(r"^[0-9a-f]{40,64}$", re.MULTILINE)
# Variables that would point git at the user's folder instead of the worktree.
_LOCATIONS = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX")


@dataclass(frozen=True)
class Commit:
    """A commit.

    Attributes:
        sha: Its full name.
        subject: The first line of its message.
        author: The author's name.
        date: The day on which it was written, as ``YYYY-MM-DD``.
    """

    sha: str
    subject: str
    author: str
    date: str

    @property
    def short(self) -> str:
        """The first ten digits of its name; the subject of a list of packages, without author."""
        return self.sha[:10] if self.author else self.subject


class Repository:
    """The repository that holds a folder.

    Args:
        folder: Any folder in its working tree.

    Attributes:
        root: The top of the working tree.

    Raises:
        SettingError: If the folder is not in a git repository, or git is missing.
    """

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
        try:
            text = run_git(
                self.root, "log", "-1", f"--format={_FORMAT}", "--end-of-options", revision
            )
        except CommandError:
            raise SettingError(
                f"{revision!r} does not name a commit of {self.root}. Give a hash, a tag, a branch "
                "or an expression such as HEAD~20."
            ) from None
        return Commit(*text.rstrip("\n").split("\0"))

    def is_ancestor(self, earlier: Commit, later: Commit) -> bool:
        """Return whether a commit comes before another one."""
        with suppress(CommandError):
            run_git(self.root, "merge-base", "--is-ancestor", earlier.sha, later.sha)
            return True
        return False

    def count_between(self, earlier: Commit, later: Commit) -> int:
        """Return how many commits ``earlier..later`` has."""
        return int(run_git(self.root, "rev-list", "--count", f"{earlier.sha}..{later.sha}"))

    def list_ancestors(self, commit: Commit) -> list[str]:
        """Return the names of a commit and its first parents, newest first."""
        return run_git(self.root, "rev-list", "--first-parent", commit.sha).split()

    def show(self, commit: Commit) -> str:
        """Return what a commit changed, as a patch below a list of files."""
        return run_git(
            self.root, "show", "--format=", "--stat", "--patch", "--no-color", commit.sha
        )

    @contextmanager
    def open_worktree(self, links: Sequence[str] = ()) -> "Iterator[Worktree]":
        """Yield a worktree outside the repository's folders; it is removed at the end.

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
            folder = Path(parent, self.root.name)
            run_git(self.root, "worktree", "add", "--detach", "--quiet", str(folder), "HEAD")
            try:
                yield Worktree(self, folder, tuple(links))
            finally:
                run_git(self.root, "worktree", "remove", "--force", str(folder))


@dataclass(frozen=True)
class Worktree:
    """A separate working tree for the commits of a repository.

    Attributes:
        repository: The repository.
        folder: The top of the working tree.
        links: Paths that link to those of the user's working tree.
    """

    repository: Repository
    folder: Path
    links: tuple[str, ...]

    def check_out(self, commit: Commit) -> None:
        """Check out a commit; files that an earlier training left are removed."""
        self._clean()
        run_git(self.folder, "checkout", "--quiet", "--detach", commit.sha)
        self._link()

    def start(self, good: Commit, bad: Commit) -> tuple[list[Commit], bool]:
        """Begin a bisection; see ``mark`` for what is returned."""
        self._clean()
        return self._read(run_git(self.folder, "bisect", "start", bad.sha, good.sha))

    def mark(self, verdict: str) -> tuple[list[Commit], bool]:
        """Tell git that the current commit is ``"good"`` or ``"bad"``, or to ``"skip"`` it.

        Returns:
            The next commit, which is checked out, and False. At the end: the first bad commit, or
            if skipped commits hide it, all that it may be; and True.
        """
        self._clean()
        return self._read(run_git(self.folder, "bisect", verdict, allowed=(0, 2)))

    def _read(self, output: str) -> tuple[list[Commit], bool]:
        find = self.repository.find_commit
        if found := _FIRST_BAD.search(output):
            return [find(found[1])], True
        if _ONLY_SKIPPED in output:
            return [find(sha) for sha in _COMMIT_LINE.findall(output)], True
        self._link()
        return [find(run_git(self.folder, "rev-parse", "HEAD").strip())], False

    def _clean(self) -> None:
        """Remove what a training changed and left, also what git ignores, and the links."""
        run_git(self.folder, "reset", "--hard", "--quiet")
        run_git(self.folder, "clean", "-ffdxq")

    def _link(self) -> None:
        for link in self.links:
            path = self.folder / link
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                path.symlink_to(self.repository.root / link)


def run_git(folder: Path, *words: str, allowed: Sequence[int] = (0,)) -> str:
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
    if done.returncode not in allowed:
        raise CommandError(f"The git command `git {' '.join(words)}` failed: {done.stderr.strip()}")
    return done.stdout
