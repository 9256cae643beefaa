"""The search for the commit that changed the bits of a training.

Each commit is checked out in a worktree, trained and compared with the training of a good commit. A
training that has a reference ends at its first epoch that differs. The user's folder, index and
branches stay as they are.
"""

import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

from lightning_d9m.engine.ledger.command import make_git_environment
from lightning_d9m.errors import CommandError, SettingError
from lightning_d9m.tools.comparison.ledgers import Comparison, compare_ledgers
from lightning_d9m.tools.launch.processes import running_processes
from lightning_d9m.tools.launch.runs import RunResult, Runs
from lightning_d9m.tools.segments.segment import Segment, run_segment

_REFERENCE = "LIGHTNING_D9M_REFERENCE"
# A commit may change packages: its bits decide.
_ON_STACK = "LIGHTNING_D9M_ON_STACK_DIFFERENCE"
_POLL_SECONDS = 0.1  # for a signal; git's end is noticed at once
# The full name, then the subject, the author and the day.
_FORMAT = "%H %s (%an, %as)"


@dataclass(frozen=True)
class Commit:
    """A commit.

    Attributes:
        sha: Its full name.
        title: The first line of its message, its author and the day on which it was written.
    """

    sha: str
    title: str

    @property
    def short(self) -> str:
        """The first ten digits of its name."""
        return self.sha[:10]


# Returns the folder in which a commit trains.
CheckOut: TypeAlias = Callable[[Commit], Path]


class Repository:
    """The repository that holds a folder, which may be any in its working tree.

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
        # A revision that begins with a dash is not an option of git.
        words = ("log", "-1", f"--format={_FORMAT}", "--end-of-options", revision)
        try:
            sha, _, title = run_git(self.root, *words).rstrip("\n").partition(" ")
        except CommandError:
            raise SettingError(
                f"{revision!r} does not name a commit of {self.root}. Give a hash, a tag, a branch "
                "or an expression such as HEAD~20."
            ) from None
        return Commit(sha, title)

    def list_commits(self, last: Commit, *words: str) -> list[str]:
        """Return the names of a commit and its ancestors, as options of ``git rev-list`` say."""
        lines = run_git(self.root, "rev-list", last.sha, *words).splitlines()
        return [line.partition(" ")[0] for line in lines]

    @contextmanager
    def open_checkout(self, links: Sequence[str]) -> Iterator[CheckOut]:
        """Yield a function that checks out a commit in a worktree, which is removed at the end.

        It removes the files that an earlier training left, ignored ones too, and returns the folder
        in the worktree that stands for the working folder.

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

            def check_out(commit: Commit) -> Path:
                # -x: a file that git ignores, such as a compiled extension, would be imported by
                # the next commit. The second -f removes repositories that a training cloned.
                run_git(top, "clean", "-ffdxq")
                run_git(top, "checkout", "--quiet", "--force", "--detach", commit.sha)
                # `clean` has removed the links of the commit before.
                for path in (top / link for link in links if not (top / link).exists()):
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.symlink_to(self.root / path.relative_to(top))
                if not folder.is_dir():
                    raise CommandError(f"The commit does not have the folder {folder}.")
                return folder

            # A worktree shares the objects of the user's repository, and has its own index and
            # HEAD: nothing of the user's changes, and no clone is made.
            try:
                run_git(self.root, "worktree", "add", "--detach", "--quiet", str(top), "HEAD")
                yield check_out
            finally:
                # It is not there if git could not add it. The training has left files, for which
                # git refuses without --force, and without a second one if adding it was ended.
                with suppress(CommandError):
                    run_git(self.root, "worktree", "remove", "--force", "--force", str(top))


def run_git(folder: Path, *words: str) -> str:
    """Run git in a folder and return what it printed; a signal ends it with its hooks.

    Raises:
        CommandError: If it fails.
    """
    printed, error = "", ""
    with ExitStack() as streams, running_processes() as tree:
        try:
            process = subprocess.Popen(
                ["git", "-C", str(folder), *words],
                # An error that is shown is in English, whatever the user's language is.
                env={**make_git_environment(), "LC_ALL": "C"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
            )
        except OSError as cause:
            raise CommandError(f"git cannot be started: {cause.strerror}. Install git.") from cause
        git = streams.enter_context(process)
        while not tree.received:
            with suppress(subprocess.TimeoutExpired):
                printed, error = git.communicate(timeout=_POLL_SECONDS)
                break
    if git.returncode:
        raise CommandError(f"The git command `git {' '.join(words)}` failed: {error.strip()}")
    return printed


@dataclass(frozen=True)
class Trial:
    """The training of one commit.

    Attributes:
        commit: The commit.
        verdict: How it compares with the reference; ``"skipped"`` if it did not run.
        seconds: How long it took.
        reason: Why it was skipped.
        comparison: Of a training that differs: its first fit that does. None if it has other fits.
    """

    commit: Commit
    verdict: Literal["equal", "different", "skipped"]
    seconds: float
    reason: str = ""
    comparison: Comparison | None = None


@dataclass
class Bisection:
    """The search for the first commit that differs.

    Attributes:
        repository: The repository.
        runs: The trainings; the first one is the reference.
        until: The epoch after which the first fit is ended; None to train to the end.
        links: Paths of the user's working tree that each commit needs.
        trials: The trainings so far.
        commits: How many commits were in question.
        candidates: The first commit that differs; several if skipped commits hide which one it is.
    """

    repository: Repository
    runs: Runs
    until: int | None = None
    links: Sequence[str] = ()
    trials: list[Trial] = field(default_factory=list)
    commits: int = 0
    candidates: Sequence[Commit] = ()

    @property
    def guilty(self) -> Trial | None:
        """The training of the commit that was found; None unless there is one candidate."""
        shas = [commit.sha for commit in self.candidates]
        found = [trial for trial in self.trials if [trial.commit.sha] == shas]
        return found[-1] if found else None

    def search(self, good: Commit, bad: Commit) -> None:
        """Find the first commit after ``good`` that differs from it.

        Args:
            good: A commit with the right bits.
            bad: A later commit whose training differs.

        Raises:
            CommandError: If ``good`` or ``bad`` does not run.
            SettingError: If ``good`` differs from itself, or ``bad`` is equal.
        """
        with self.repository.open_checkout(self.links) as self._check_out:
            # The first training is the reference, and the second one shows that it can be
            # reproduced at all.
            if any(self._train("good", good).verdict == "different" for _ in range(2)):
                raise SettingError(
                    f"Two trainings of the good commit {good.short} differ, so no commit can be "
                    "blamed. Find the cause first: d9m locate -- COMMAND"
                )
            # Checked first: a search among equal commits would blame the last one.
            if self._train("bad", bad).verdict == "equal":
                until = "" if self.until is None else f" until epoch {self.until}"
                raise SettingError(
                    f"The training of the bad commit {bad.short} is equal to the good one{until}. "
                    "Give a later epoch or another commit. If the command imports the project from "
                    "where it is installed (pip install -e), each commit trains the same code: set "
                    "PYTHONPATH=."
                )
            self.commits = len(self.repository.list_commits(bad, f"^{good.sha}"))
            self.candidates = list(map(self.repository.find_commit, self._narrow(good, bad)))

    def _narrow(self, good: Commit, bad: Commit) -> list[str]:
        """Train commits in between until those that are left cannot be told apart."""
        known, tested, skips = [f"^{good.sha}"], {bad.sha}, 0
        while left := [
            sha
            for sha in self.repository.list_commits(bad, "--bisect-all", *known)
            if sha not in tested
        ]:
            # Neighbors of a commit that does not run often do not run either.
            commit = self.repository.find_commit(left[min(skips**2, len(left) - 1)])
            verdict = self._try(commit).verdict
            tested.add(commit.sha)
            skips = skips + 1 if verdict == "skipped" else 0
            if verdict == "equal":
                known.append(f"^{commit.sha}")
            elif verdict == "different":
                bad = commit
        return self.repository.list_commits(bad, *known)

    def _train(self, role: str, commit: Commit) -> Trial:
        """Train a commit that must run."""
        trial = self._try(commit)
        if trial.verdict == "skipped":
            raise CommandError(
                f"The {role} commit {commit.short} must train, and it does not: {trial.reason}"
            )
        return trial

    def _try(self, commit: Commit) -> Trial:
        """Train a commit, compare it, and keep the result."""
        number = len(self.trials) + 1
        name, title = f"{number:03d}-{commit.sha[:10]}", f"training {number}, {commit.short}"
        start = time.monotonic()
        # A program with one fit then ends as soon as it differs.
        paths = [str(ledger.path) for ledger in self.runs.fits.values()]
        reference = {_REFERENCE: paths[0], _ON_STACK: "ignore"} if len(paths) == 1 else {}
        try:
            words: dict[str, Any] = {"working_folder": self._check_out(commit), "may_fail": True}
            words["variables"] = reference
            if self.until is None:
                run = self.runs.run(name, title, **words)
            else:
                part = Segment(None, self.until, kind="epoch")
                run = run_segment(self.runs, part, name, title, **words)
        except CommandError as error:  # the commit cannot be checked out, or has no such part
            run = RunResult({}, failure=error)
        seconds = round(time.monotonic() - start, 3)
        trial = self._judge(commit, run, seconds)
        self.trials.append(trial)
        return trial

    def _judge(self, commit: Commit, run: RunResult, seconds: float) -> Trial:
        """Compare the ledgers of a training with the reference."""
        reference = self.runs.fits
        for name in (name for name in reference if name in run.fits):
            # A fit that differs settles it, even if the training failed later.
            found = compare_ledgers(reference[name], run.fits[name])
            # That a failed training ends otherwise is not a difference of bits.
            is_settled = run.failure is None or any(not own.is_end for own in found.divergences)
            if (found.verdict == "different" and is_settled) or found.refusals:
                return Trial(commit, "different", seconds, "", found)
        if run.failure is not None:
            return Trial(commit, "skipped", seconds, str(run.failure).partition("\n")[0])
        # A segment ends in the first fit, so it lacks the later ones.
        if self.until is None and run.fits.keys() != reference.keys():
            return Trial(commit, "different", seconds)
        return Trial(commit, "equal", seconds)
