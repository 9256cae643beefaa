"""Pairs of runs of one command, controlled by environment variables, and how they compare."""

import re
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path

from lightning_d9m.comparison.differences import Divergence
from lightning_d9m.comparison.ledgers import Comparison, compare_ledgers
from lightning_d9m.comparison.rank_drift import find_rank_drift
from lightning_d9m.errors import CommandError, DriftError
from lightning_d9m.launch.left_files import FileWatch
from lightning_d9m.launch.run import make_run_folder, pair_fits, read_fits, run_once
from lightning_d9m.ledger.folder import Ledger, list_fits, read_ledger
from lightning_d9m.ledger.format.records import Digests

_DUMP = "LIGHTNING_D9M_DUMP"
_DUMP_NAMES = "LIGHTNING_D9M_DUMP_NAMES"
# torch fills new memory only while deterministic algorithms are on.
_FILLED = {"LIGHTNING_D9M_CONTROL": "on", "LIGHTNING_D9M_FILL_UNINITIALIZED_MEMORY": "1"}


@dataclass(frozen=True)
class ProbedRun:
    """One run and the files that it wrote.

    Attributes:
        fits: Its ledgers by name.
        dump: The folder of its dumps, whether or not something was saved there.
        drift_error: The error of a run that ended with a ``DriftError``; None for any other.
    """

    fits: Mapping[str, Ledger]
    dump: Path
    drift_error: CommandError | None = None


@dataclass(frozen=True)
class RunPair:
    """Two runs and how they compare.

    Attributes:
        fit: Name of the first fit that differs; of the last one if none does.
        comparison: How that fit compares.
        expected: Its ledger in the first run.
        fits: Number of fits in each run.
        dumps: The folders of dumps of the two runs.
        rank_drift: Where ranks differ from the others, in two runs that are equal; one
            ``Divergence`` for each such rank.
    """

    fit: str
    comparison: Comparison
    expected: Ledger
    fits: int = 1
    dumps: tuple[Path, ...] = ()
    rank_drift: tuple[Divergence, ...] = ()

    @property
    def differs(self) -> bool:
        """Whether the two runs differ."""
        return not self.comparison.equal

    def steps_of_epoch(self, epoch: int) -> tuple[int, int]:
        """Return the global steps of an epoch, as the first one and the one after the last."""
        ends = {-1: 0}
        for record in self.expected.line_records(min(self.expected.files)):
            if isinstance(record, Digests) and record.moment == "epoch":
                ends[record.epoch] = record.step
        return ends.get(epoch - 1, 0), ends.get(epoch, 2**31)


@dataclass
class Runner:
    """Runs the command, each time in a new folder.

    The fits of each run get the names of their counterparts in the first run.

    Attributes:
        command: The command.
        output: Parent folder of all runs.
        timeout: Seconds after which a run counts as hanging.
        variables: Environment variables of every run.
        files: What the runs write and read.
    """

    command: list[str]
    output: Path
    timeout: float | None
    variables: Mapping[str, str]
    files: FileWatch = field(init=False)
    _numbers: "count[int]" = field(default_factory=lambda: count(1))
    _first: Mapping[str, Ledger] | None = None
    _seconds: float | None = None  # of the last run
    _stage: str = ""

    def __post_init__(self) -> None:
        self.files = FileWatch(self.command, self.output)

    def run(self, stage: str, *, dump: str = "", filled: bool = False, **probes: str) -> ProbedRun:
        """Run once.

        Args:
            stage: Name of the look, for the progress line.
            dump: Name of the place whose values are saved; empty for none.
            filled: Whether to switch on everything that fills new memory.
            **probes: Settings of the probes, by name.

        Raises:
            CommandError: If the run fails for another reason than a ``DriftError``, or leaves no
                ledger.
        """
        number = next(self._numbers)
        folder = make_run_folder(self.output, f"run-{number:03d}")
        variables = {f"LIGHTNING_D9M_{name.upper()}": text for name, text in probes.items()}
        variables |= _FILLED if filled else {}
        if dump:
            place = escape_name(dump)  # and its leaves
            variables |= {_DUMP: str(folder / "dump"), _DUMP_NAMES: f"{place},{place}:[!:]*"}
        drift_error = None
        start = time.monotonic()
        try:
            run_once(
                self.command,
                folder,
                title=f"run {number}, {stage}",
                timeout=self.timeout,
                variables={**self.variables, **variables},
                expected_seconds=self._seconds,
            )
        except CommandError as error:
            if not _ended_with_drift(folder):
                raise
            drift_error = error
        self._seconds = time.monotonic() - start
        self.files.note_run()
        fits = read_fits(folder, self.command)
        if self._first is None:
            self._first = fits
        return ProbedRun(pair_fits(self._first, fits), folder / "dump", drift_error)

    def run_pair(
        self, stage: str, *, dump: str = "", filled: bool = False, **probes: str
    ) -> RunPair:
        """Run twice and compare; the arguments are those of ``run``.

        Raises:
            CommandError: If a run fails, if the two leave different ledgers, or if a run ends with
                a ``DriftError`` that neither the comparison of the runs nor that of the ranks
                shows.
        """
        known, self._stage = self._stage, stage
        if known != stage and self._seconds is not None:
            seconds = f"{2 * self._seconds:.0f} s for each pair of runs"
            print(f"next look: {stage}, about {seconds}", file=sys.stderr, flush=True)
        runs = [self.run(stage, dump=dump, filled=filled, **probes) for _ in range(2)]
        expected, actual = runs[0].fits, runs[1].fits
        if expected.keys() != actual.keys():
            raise CommandError(
                f"The two runs left different ledgers: {', '.join(expected)} and "
                f"{', '.join(actual)}. Each run must fit the same models in the same order."
            )
        dumps = tuple(run.dump for run in runs)
        pairs = [
            RunPair(name, compare_ledgers(ledger, actual[name]), ledger, len(expected), dumps)
            for name, ledger in expected.items()
        ]
        pair = next((pair for pair in pairs if pair.differs), None)
        error = next((run.drift_error for run in runs if run.drift_error is not None), None)
        if pair is None and error is not None:
            drifting = (replace(own, rank_drift=find_rank_drift(own.expected)) for own in pairs)
            pair = next((found for found in drifting if found.rank_drift), None)
            if pair is None:
                raise error
        return pair or pairs[-1]


def escape_name(name: str) -> str:
    """Return a pattern that matches one name; a comma, which separates patterns, becomes ``?``."""
    return re.sub(r"([*?[])", r"[\1]", name).replace(",", "?")


def _ended_with_drift(folder: Path) -> bool:
    """Return whether a run ended with a ``DriftError``, from its reference or across ranks."""
    ledgers = map(read_ledger, list_fits(folder))
    ends = [ledger.outcome(rank).end for ledger in ledgers for rank in ledger.files]
    return any(end and (end.error or "").startswith(DriftError.__name__) for end in ends)
