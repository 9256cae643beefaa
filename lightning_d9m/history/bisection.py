"""The search for the commit that changed the bits of a training.

Each commit is trained in a worktree and compared with the training of a good commit, or with a
golden ledger. A training that has a reference ends at its first epoch that differs.
"""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, Literal

from lightning_d9m.comparison.ledgers import Comparison, compare_ledgers
from lightning_d9m.comparison.weight_distance import DistanceSeries
from lightning_d9m.errors import CommandError
from lightning_d9m.history.repository import Commit, Repository, Worktree
from lightning_d9m.launch.progress import EpochCounter
from lightning_d9m.launch.run import make_run_folder, pair_fits, read_fits, run_once
from lightning_d9m.ledger.folder import Ledger

_REFERENCE = "LIGHTNING_D9M_REFERENCE"

TrialVerdict = Literal["equal", "different", "skipped"]


@dataclass(frozen=True)
class Trial:
    """The training of one commit.

    Attributes:
        commit: The commit.
        verdict: How it compares with the reference; ``"skipped"`` if it did not run.
        seconds: How long it took.
        reason: Why it was skipped.
        comparison: Of a training that differs: its first fit that does. None if it has other fits.
        distance: How far the weights are apart where they first differ, relative to their norm;
            None if that is not known.
    """

    commit: Commit
    verdict: TrialVerdict
    seconds: float
    reason: str = ""
    comparison: Comparison | None = None
    distance: float | None = None


@dataclass(frozen=True)
class BisectResult:
    """The result of a bisection.

    Attributes:
        candidates: The first commit that differs; several if skipped commits hide which one it is.
        good: The last commit known to be equal before the search.
        bad: The commit that was known to differ.
        commits: How many commits were in question.
        trials: The trainings, in order.
        patch: What the commit changed; empty if there are several candidates.
        noun: The kind of the candidates: ``"commit"``, or ``"package"``.
    """

    candidates: tuple[Commit, ...]
    good: Commit
    bad: Commit
    commits: int
    trials: tuple[Trial, ...]
    patch: str
    noun: str = "commit"

    @property
    def guilty(self) -> Trial | None:
        """The training of the commit that was found."""
        found = [trial for trial in self.trials if trial.commit.sha == self.candidates[0].sha]
        return found[-1] if found and len(self.candidates) == 1 else None


@dataclass
class Bisection:
    """Trains commits of a repository.

    Attributes:
        repository: The repository.
        command: The command that trains.
        output: Parent folder of all runs.
        until: The epoch after which a training is ended; None to train to the end.
        timeout: Seconds after which a training counts as hanging.
        links: Paths of the user's working tree that each commit needs.
        golden: The ledger to compare with; None for that of the good commit.
        noun: The kind of what is searched for.
        side: The kind of what is trained.
        equal_advice: A reason for which the bad training may be equal to the good one.
    """

    noun: ClassVar[str] = "commit"
    side: ClassVar[str] = "commit"
    equal_advice: ClassVar[str] = (
        "If the command imports the project from where it is installed (pip install -e), each "
        "commit trains the same code: set PYTHONPATH=."
    )
    repository: Repository
    command: Sequence[str]
    output: Path
    until: int | None = None
    timeout: float | None = None
    links: Sequence[str] = ()
    golden: Ledger | None = None
    _trials: list[Trial] = field(default_factory=list)
    _reference: dict[str, Ledger] = field(default_factory=dict)

    def search(self, good: Commit | None, bad: Commit) -> BisectResult:
        """Find the first commit after ``good`` that differs from it.

        Args:
            good: A commit with the right bits; None to look for one among the ancestors of ``bad``,
                which needs a golden ledger.
            bad: A later commit whose training differs.

        Raises:
            CommandError: If ``good`` differs from itself or does not run, or ``bad`` is equal.
        """
        repository = self.repository
        with repository.open_worktree(self.links) as self._worktree:
            if self.golden is not None:
                self._reference = {self.golden.path.name: self.golden}
            if good is not None:
                self._check_good(good)
            self._check_bad(bad)
            if good is None:
                good, bad = self._find_good(bad)
            known = [f"^{good.sha}"]
            result = BisectResult(
                (), good, bad, len(repository.list_commits(bad, *known)), (), "", self.noun
            )
            tested, skips = {bad.sha}, 0
            while left := [
                sha
                for sha in repository.list_commits(bad, "--bisect-all", *known)
                if sha not in tested
            ]:
                # Neighbors of a commit that does not run often do not run either.
                commit = repository.find_commit(left[min(skips**2, len(left) - 1)])
                verdict = self._try(commit).verdict
                tested.add(commit.sha)
                skips = skips + 1 if verdict == "skipped" else 0
                if verdict == "equal":
                    known.append(f"^{commit.sha}")
                elif verdict == "different":
                    bad = commit
        found = tuple(map(repository.find_commit, repository.list_commits(bad, *known)))
        patch = repository.show(bad) if len(found) == 1 else ""
        return replace(result, candidates=found, trials=tuple(self._trials), patch=patch)

    def prepare(self, worktree: Worktree) -> tuple[Path, Mapping[str, str]]:
        """Return the folder in which the command runs, and further variables of it."""
        below = Path.cwd().resolve().relative_to(self.repository.root.resolve())
        return worktree.folder / below, {}

    def _check_good(self, good: Commit) -> None:
        """Train a good commit; twice if its own training is the reference."""
        for again in (False, True) if self.golden is None else (True,):
            if self._train("good", good).verdict == "different":
                raise CommandError(
                    f"The good {self.side} {good.short} differs from the golden ledger "
                    f"{self.golden.path}. Give an earlier one."
                    if self.golden is not None
                    else f"Two trainings of the good {self.side} {good.short} differ, so no "
                    f"{self.noun} can be blamed. Find the cause first: d9m locate -- COMMAND"
                )
            if not again:
                self._reference = dict(self._fits)

    def _check_bad(self, bad: Commit) -> None:
        if self._train("bad", bad).verdict == "equal":
            until = "" if self.until is None else f" until epoch {self.until}"
            raise CommandError(
                f"The training of the bad {self.side} {bad.short} is equal to the good "
                f"one{until}. Give a later epoch or another {self.side}. {self.equal_advice}"
            )

    def _train(self, role: str, commit: Commit) -> Trial:
        """Train a commit that must run."""
        trial = self._try(commit)
        if trial.verdict == "skipped":
            raise CommandError(
                f"The {role} {self.side} {commit.short} must train, and it does not: {trial.reason}"
            )
        return trial

    def _find_good(self, bad: Commit) -> tuple[Commit, Commit]:
        """Return an ancestor that agrees with the golden ledger, and the next one that does not.

        The steps back are 1, 2, 4, 8, ... commits along first parents.
        """
        ancestors = self.repository.list_commits(bad, "--first-parent")
        last = len(ancestors) - 1
        powers = range(last.bit_length() + 1) if last else ()
        for step in dict.fromkeys(min(2**power, last) for power in powers):
            commit = self.repository.find_commit(ancestors[step])
            verdict = self._try(commit).verdict
            if verdict == "equal":
                return commit, bad
            if verdict == "different":
                bad = commit
        assert self.golden is not None, "without it there is a good commit"
        raise CommandError(
            f"No ancestor of {bad.short} that was tried agrees with the golden ledger "
            f"{self.golden.path}. Give a good commit: "
            "d9m bisect GOOD..BAD -- COMMAND"
        )

    def _try(self, commit: Commit) -> Trial:
        """Train a commit, compare it, and keep the result."""
        number = len(self._trials) + 1
        own = make_run_folder(self.output, f"{number:03d}-{commit.sha[:10]}")
        counter = EpochCounter(own)
        until = self.until

        def has_reached_end() -> bool:
            return until is not None and counter.count() > until

        start = time.monotonic()
        failure: CommandError | None = None
        try:
            self._worktree.check_out(commit)
            folder, variables = self.prepare(self._worktree)
            with _working_in(folder):
                run_once(
                    self.command,
                    own,
                    title=f"training {number}, {commit.short}",
                    timeout=self.timeout,
                    variables={**self._variables(), **variables},
                    killed_when=has_reached_end,
                    expected_seconds=self._trials[-1].seconds if self._trials else None,
                )
            self._fits = read_fits(own, self.command)
        except CommandError as error:
            failure = error
            self._fits = {}
            with suppress(CommandError):
                self._fits = read_fits(own, self.command)
        trial = self._judge(commit, failure, time.monotonic() - start, cut=has_reached_end())
        self._trials.append(trial)
        return trial

    def _variables(self) -> dict[str, str]:
        """Return the reference of a program with one fit; it then ends as soon as it differs."""
        if len(self._reference) != 1:
            return {}
        return {_REFERENCE: str(next(iter(self._reference.values())).path)}

    def _judge(
        self, commit: Commit, failure: CommandError | None, seconds: float, *, cut: bool
    ) -> Trial:
        """Compare the ledgers of a training with the reference."""
        if self._reference and self._fits:
            pairs = pair_fits(self._reference, self._fits)
            for name, expected in self._reference.items():
                if name not in pairs:
                    continue
                distances = DistanceSeries()
                found = compare_ledgers(expected, pairs[name], watch=distances.watch)
                if found.verdict == "different" or found.refusals:
                    distance = _first_distance(distances)
                    return Trial(commit, "different", seconds, "", found, distance)
            if failure is None and not cut and pairs.keys() != self._reference.keys():
                return Trial(commit, "different", seconds)
        if failure is not None:
            return Trial(commit, "skipped", seconds, str(failure).partition("\n")[0])
        return Trial(commit, "equal", seconds)


@contextmanager
def _working_in(folder: Path) -> Iterator[None]:
    """Make a folder the working folder of this process, and so of the commands that it starts.

    Raises:
        CommandError: If the commit does not have it.
    """
    before = Path.cwd()
    try:
        os.chdir(folder)
    except OSError:
        raise CommandError(f"The commit does not have the folder {folder}.") from None
    try:
        yield
    finally:
        os.chdir(before)


def _first_distance(distances: DistanceSeries) -> float | None:
    """Return the greatest relative distance of a layer at the first epoch that differs."""
    for step in sorted(distances.moments):
        layers = distances.moments[step].values()
        if found := [layer.relative for layer in layers if layer.differing]:
            return max(found)
    return None
