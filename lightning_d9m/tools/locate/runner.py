"""The runs of one command that a search compares.

Environment variables control them: where they begin and end, what is probed, and which values are
kept.
"""

import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

from lightning_d9m.engine.ledger.differences import Divergence
from lightning_d9m.engine.ledger.folder import Ledger
from lightning_d9m.engine.probes.outside import VARIABLE as WATCH
from lightning_d9m.engine.recording.interruption import FOLDER, INTERRUPT, KEEP
from lightning_d9m.errors import CommandError, LedgerError
from lightning_d9m.tools.comparison.ledgers import Comparison, compare_ledgers, find_rank_drift
from lightning_d9m.tools.launch.runs import RunResult, Runs
from lightning_d9m.tools.segments.pair import PairWatch
from lightning_d9m.tools.segments.segment import Segment, is_drift, list_ends, run_segment

# The whole run, the operations, the modules, the values, filled memory.
_MOST_LOOKS = 5
# A difference in 1 of 20 runs shows in 50 of them with a probability of 1 - 0.95 ** 50, 92%.
_MOST_SEGMENTS = 50
# Of a look that repeats a segment if the first look was shorter: small programs differ rarely too.
_FEWEST_SECONDS = 5.0
_PAIR = 2
WHOLE = "whole run"
# The folder of the checkpoints that a run keeps for later looks.
KEPT = "kept"


@dataclass(frozen=True)
class RunPair:
    """Two runs and how they compare.

    Attributes:
        fit: Name of the first fit that differs; of the last one if none does.
        comparison: How that fit compares.
        expected: Its ledger in the first run.
        fits: Number of fits in each run.
        equal_fits: Number of those before it, which are equal.
        actual: Its ledger in the second run.
        is_first: Whether it is the only first fit of a process, which variables reach.
        rank_drift: Where a rank differs from another, in two runs that are equal.
    """

    fit: str
    comparison: Comparison
    expected: Ledger
    fits: int = 1
    equal_fits: int = 0
    actual: Ledger | None = None
    is_first: bool = False
    rank_drift: Divergence | None = None

    @property
    def differs(self) -> bool:
        """True if the two runs differ, or one of them continues after the other."""
        found = self.comparison
        return found.one_is_longer or found.verdict not in ("equal", "incomplete")


class Runner:
    """Runs the command, each time in a new folder.

    The first two runs train side by side and end at their first difference.

    Args:
        runs: The runs of the command.
        variables: Environment variables of every run.
        beside: Whether the first two train beside each other; else the second follows the first.

    Attributes:
        command: The command.
        made: The runs, in order.
        failed: A sentence on each run that failed beside another one, whose folder is kept.
    """

    def __init__(self, runs: Runs, variables: Mapping[str, str], *, beside: bool = True) -> None:
        self.command = runs.command
        self._runs = runs
        self._variables = variables
        self._beside = beside
        self.made: list[RunResult] = []
        self.failed: list[str] = []
        self._numbers = count(1)
        self._looks = 0
        self._seconds = 0.0  # that the first look took

    def run(
        self,
        stage: str,
        *,
        segment: Segment | None = None,
        later: int = 0,
        watched: Path | None = None,
        **settings: str,
    ) -> RunResult:
        """Run once.

        Args:
            stage: Name of the look, for the progress line.
            segment: The part of the run; None for all of it.
            later: The number of runs of the look that follow.
            watched: The folder of a run that has ended; this one ends where it first differs.
            **settings: Settings of the session and the probes, by name.

        Raises:
            CommandError: If the run fails for another reason than a ``DriftError``, or leaves no
                ledger.
        """
        folder, variables = self._prepare(settings, keeps=stage == WHOLE)
        title = f"{folder.name.replace('-', ' ')}, {stage}"
        words: dict[str, Any] = {"variables": variables, "later": later}
        if segment is not None:
            run = run_segment(self._runs, segment, folder.name, title, **words)
        else:
            words["may_fail"] = True
            if watched is None:
                run = self._runs.run(folder.name, title, **words)
            else:
                with PairWatch((watched, folder)) as watch:
                    run = self._runs.run(folder.name, title, killed_when=watch.differs, **words)
        if (failure := self._find_failure(run)) is not None:
            raise failure
        self.made.append(run)
        return run

    def _prepare(self, settings: Mapping[str, str], *, keeps: bool) -> tuple[Path, dict[str, str]]:
        """Return the folder of the next run, and its variables.

        With ``keeps`` it keeps checkpoints, from which later looks begin.
        """
        folder = self._runs.output / f"run-{next(self._numbers):03d}"
        variables = {f"LIGHTNING_D9M_{name.upper()}": text for name, text in settings.items()}
        variables[WATCH] = str(folder)
        variables |= {INTERRUPT: KEEP, FOLDER: str(folder / KEPT)} if keeps else {}
        return folder, {**self._variables, **variables}

    @staticmethod
    def _find_failure(run: RunResult) -> CommandError | LedgerError | None:
        """Return why a run failed, unless a difference between ranks ended it."""
        drifts = run.failure is not None and any(map(is_drift, list_ends(*run.fits.values())))
        return None if drifts else run.failure

    def run_first(self, stage: str, **settings: str) -> list[RunResult]:
        """Run twice, and compare while the runs train; both end where they first differ."""
        made = [self._prepare(settings, keeps=True) for _ in range(_PAIR)]
        folders = [folder for folder, _ in made]
        variables = [
            {**own, INTERRUPT: f"{KEEP}:{other}"}
            for (_, own), other in zip(made, reversed(folders), strict=True)
        ]
        names = [folder.name for folder in folders]
        title = f"runs 1 and 2, {stage}"
        with PairWatch((folders[0], folders[1])) as watch:
            runs = self._runs.run_beside(names, title, variables, watch.differs)
        failures = [self._find_failure(run) for run in runs]
        if not any(failures):
            self.made += runs
            return runs
        # Where both fail, a third run would most often only show it again.
        if all(failures):
            hint = "both runs failed. If each needs a device, a port or memory alone: --one-by-one"
            print(hint, file=sys.stderr, flush=True)
        # They may need a port, a device or memory that only one of them can have.
        for folder, failure in zip(folders, failures, strict=True):
            if failure is None:
                shutil.rmtree(folder, ignore_errors=True)
            elif all(failures):
                raise failure
            else:
                self._keep_failed(folder, failure)
        print("a run failed beside the other: one after the other", file=sys.stderr, flush=True)
        self._numbers, self._runs.fits = count(1), {}
        words: dict[str, Any] = dict(settings)
        return [self.run(stage, **words), self.run(stage, watched=folders[0], **words)]

    def _keep_failed(self, folder: Path, failure: Exception) -> None:
        """Rename the folder of a run that failed, and say why; it may not fail again."""
        kept = folder.with_name(folder.name.replace("run", "failed"))
        folder.rename(kept)
        said = str(failure).replace(str(folder), str(kept))
        print(said, file=sys.stderr, flush=True)
        # The last line of its log is most often the error.
        first, *others = said.splitlines()
        reason = " ".join([first, *(line.lstrip(" |") for line in others[-1:])])
        self.failed.append(f"{WHOLE}: a run failed beside the other, and both ran again: {reason}")

    def run_pairs(
        self,
        stage: str,
        tries: int,
        *,
        segment: Segment | None = None,
        **settings: str,
    ) -> Iterator[RunPair]:
        """Run, and yield how each further run compares with the first one.

        Whole runs are ``2 * tries``. A segment is run up to 50 times, as long as this takes no
        longer than the first look did, or 5 s; the other arguments are those of ``run``.

        Raises:
            CommandError: If a run fails, if two leave different ledgers, or if a run ends with a
                ``DriftError`` that neither the comparison of the runs nor that of the ranks shows.
        """
        begun = time.monotonic()
        self._looks += 1
        words: dict[str, Any] = {"segment": segment, **settings}
        if stage == WHOLE and self._beside:
            first, *others = self.run_first(stage, **settings)
        else:
            if self._runs.seconds is not None:
                look = f"look {self._looks} of at most {_MOST_LOOKS}: {stage}"
                print(look, file=sys.stderr, flush=True)
            first, others = self.run(stage, later=1, **words), []
        folder = next(iter(first.fits.values())).path.parent
        # The first run cannot know which operation will differ; each later one compares with it.
        if "evidence" in settings:
            words["evidence_of"] = str(folder)
        made, most = 1, 2 * tries if segment is None else _MOST_SEGMENTS
        limit = max(self._seconds, _FEWEST_SECONDS)
        while others or made < 2 * tries or (made < most and time.monotonic() - begun < limit):
            if not others:
                watched = folder if stage == WHOLE else None
                others = [self.run(stage, watched=watched, **words)]
            made += 1
            # Before the first comparison: who searches ends this generator at a difference.
            if stage == WHOLE and not self._seconds:
                self._seconds = time.monotonic() - begun
            yield self._compare(first, others.pop())

    def _compare(self, *runs: RunResult) -> RunPair:
        expected, actual = (run.fits for run in runs)
        both = [name for name in expected if name in actual]
        firsts = [
            name for name in expected if name.startswith("fit-") and not expected[name].header.fit
        ]
        pairs = [
            RunPair(
                name,
                compare_ledgers(expected[name], actual[name]),
                expected[name],
                len(both),
                number,
                actual[name],
                firsts == [name],
            )
            for number, name in enumerate(both)
        ]
        pair = next((pair for pair in pairs if pair.differs), None)
        error = next((run.failure for run in runs if run.failure is not None), None)
        if pair is None and error is not None:
            drifting = (replace(own, rank_drift=find_rank_drift(own.expected)) for own in pairs)
            pair = next((found for found in drifting if found.rank_drift), None)
            if pair is None:
                raise error
        # After the comparison: a run that was ended where it differs may lack later fits, or have
        # begun one that the other has not.
        if pair is None and expected.keys() != actual.keys():
            raise CommandError(
                f"The two runs left different ledgers: {', '.join(expected)} and "
                f"{', '.join(actual)}. Each run must fit the same models in the same order."
            )
        return pair or pairs[-1]
