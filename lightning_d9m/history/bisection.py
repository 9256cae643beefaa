"""The search for the commit that changed the bits of a training.

Each commit is checked out, trained and compared with the training of a good commit, or with a
golden ledger. A training that has a reference ends at its first epoch that differs.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from lightning_d9m.comparison.ledgers import Comparison, compare_ledgers
from lightning_d9m.comparison.weight_distance import DistanceSeries
from lightning_d9m.errors import CommandError
from lightning_d9m.history.repository import Commit, Repository
from lightning_d9m.launch.progress import EpochCounter
from lightning_d9m.launch.run import Run, Runs

_REFERENCE = "LIGHTNING_D9M_REFERENCE"


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
    verdict: Literal["equal", "different", "skipped"]
    seconds: float
    reason: str = ""
    comparison: Comparison | None = None
    distance: float | None = None


@dataclass
class Bisection:
    """The search for the first commit that differs.

    Attributes:
        repository: The repository.
        runs: The trainings; the first one is the reference, unless a golden ledger is.
        until: The epoch after which a training is ended; None to train to the end.
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
        """The training of the commit that was found; None if there are several candidates."""
        found = [trial for trial in self.trials if trial.commit.sha == self.candidates[0].sha]
        return found[-1] if found and len(self.candidates) == 1 else None

    def search(self, good: Commit | None, bad: Commit) -> None:
        """Find the first commit after ``good`` that differs from it.

        Args:
            good: A commit with the right bits; None if a golden ledger has them.
            bad: A later commit whose training differs.

        Raises:
            CommandError: If ``good`` differs from itself or does not run, or ``bad`` is equal.
        """
        side, noun = self.repository.side, self.repository.noun
        with self.repository.open_checkout(self.links) as self._check_out:
            if good is not None and any(
                self._train("good", good).verdict == "different" for _ in range(2)
            ):
                raise CommandError(
                    f"Two trainings of the good {side} {good.short} differ, so no {noun} can "
                    "be blamed. Find the cause first: d9m locate -- COMMAND"
                )
            if self._train("bad", bad).verdict == "equal":
                until = "" if self.until is None else f" until epoch {self.until}"
                raise CommandError(
                    f"The training of the bad {side} {bad.short} is equal to the good one{until}. "
                    f"Give a later epoch or another {side}. {self.repository.equal_advice}"
                )
            if good is None:
                good, bad = self._find_good(bad)
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
                f"The {role} {self.repository.side} {commit.short} must train, and it does not: "
                f"{trial.reason}"
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
        raise CommandError(
            f"No ancestor of {bad.short} that was tried agrees with the golden ledger. Give a good "
            "commit: d9m bisect GOOD..BAD -- COMMAND"
        )

    def _try(self, commit: Commit) -> Trial:
        """Train a commit, compare it, and keep the result."""
        number = len(self.trials) + 1
        name = f"{number:03d}-{commit.sha[:10]}"
        epochs, start = EpochCounter(self.runs.output / name), time.monotonic()

        def has_reached_end() -> bool:
            return self.until is not None and epochs.count() > self.until

        # A program with one fit then ends as soon as it differs.
        paths = [str(ledger.path) for ledger in self.runs.fits.values()]
        reference = {_REFERENCE: paths[0]} if len(paths) == 1 else {}
        try:
            folder, variables = self._check_out(commit)
            run = self.runs.run(
                name,
                f"training {number}, {commit.short}",
                may_fail=True,
                working_folder=folder,
                variables={**reference, **variables},
                killed_when=has_reached_end,
            )
        except CommandError as error:  # the commit cannot be checked out
            run = Run({}, failure=error)
        trial = self._judge(commit, run, time.monotonic() - start, is_cut=has_reached_end())
        self.trials.append(trial)
        return trial

    def _judge(self, commit: Commit, run: Run, seconds: float, *, is_cut: bool) -> Trial:
        """Compare the ledgers of a training with the reference."""
        reference = self.runs.fits
        for name in (name for name in reference if name in run.fits):
            distances = DistanceSeries()
            found = compare_ledgers(reference[name], run.fits[name], watch=distances.watch)
            if found.verdict == "different" or found.refusals:
                # The greatest of a layer at the first epoch that differs.
                layers = [
                    [
                        layer.relative
                        for layer in distances.moments[step].values()
                        if layer.differing
                    ]
                    for step in sorted(distances.moments)
                ]
                distance = next((max(relative) for relative in layers if relative), None)
                return Trial(commit, "different", seconds, "", found, distance)
        if run.failure is not None:
            return Trial(commit, "skipped", seconds, str(run.failure).partition("\n")[0])
        if not is_cut and run.fits.keys() != reference.keys():
            return Trial(commit, "different", seconds)
        return Trial(commit, "equal", seconds)
