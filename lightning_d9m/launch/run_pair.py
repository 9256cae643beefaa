"""Pairs of runs of one command, steered by variables, and how they compare."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from lightning_d9m.comparison.ledgers import Comparison, compare_ledgers
from lightning_d9m.errors import CommandError, DriftError
from lightning_d9m.launch.run import make_run_folder, read_fits, run_once
from lightning_d9m.ledger.folder import Ledger, list_fits, read_ledger
from lightning_d9m.ledger.records import Digests, End

_DUMP = "LIGHTNING_D9M_DUMP"
_DUMP_NAMES = "LIGHTNING_D9M_DUMP_NAMES"
# Memory is filled only where deterministic algorithms are on.
_FILLED = {"LIGHTNING_D9M_CONTROL": "on", "LIGHTNING_D9M_FILL_UNINITIALIZED_MEMORY": "1"}


@dataclass(frozen=True)
class RunPair:
    """Two runs and how they compare.

    Attributes:
        fit: Name of the first fit that differs; of the last when none does.
        comparison: How that fit compares.
        expected: Its ledger in the first run.
        fits: How many fits each run has.
        dumps: The folders of dumps of the two runs, if any were asked for.
    """

    fit: str
    comparison: Comparison
    expected: Ledger
    fits: int = 1
    dumps: tuple[Path, ...] = ()

    @property
    def differs(self) -> bool:
        """Whether anything differs."""
        return not self.comparison.equal

    def steps_of_epoch(self, epoch: int) -> tuple[int, int]:
        """Return the global steps of an epoch, from the first up to but without the last."""
        ends = {-1: 0}
        for record in self.expected.records(min(self.expected.files)):
            if isinstance(record, Digests) and record.moment == "epoch":
                ends[record.epoch] = record.step
        return ends.get(epoch - 1, 0), ends.get(epoch, 2**31)


@dataclass
class Runner:
    """Runs the command in pairs, each run in a folder of its own.

    Attributes:
        words: The command.
        output: Folder for all runs.
        timeout: Seconds after which a run counts as hanging.
        steering: Variables of every run.
    """

    words: list[str]
    output: Path
    timeout: float | None
    steering: Mapping[str, str]
    _numbers: "count[int]" = field(default_factory=lambda: count(1))

    def run_pair(
        self, stage: str, *, dump: str = "", filled: bool = False, **probes: str
    ) -> RunPair:
        """Run twice and compare; the names of ``probes`` are those of the settings.

        Args:
            stage: What progress calls the runs.
            dump: Name of the place whose values are saved; empty for none.
            filled: Whether everything is switched on that fills new memory.
            **probes: Settings of the probes.

        Raises:
            CommandError: When a run fails, or the two leave different ledgers. That its ranks had
                drifted apart is no failure if its twin shows something else.
        """
        variables = {f"LIGHTNING_D9M_{name.upper()}": text for name, text in probes.items()}
        variables |= _FILLED if filled else {}
        found: list[dict[str, Ledger]] = []
        dumps: list[Path] = []
        drifted: CommandError | None = None
        for _ in range(2):
            number = next(self._numbers)
            folder = make_run_folder(self.output, f"run-{number:03d}")
            if dump:
                dumps.append(folder / "dump")
                variables[_DUMP] = str(dumps[-1])
                variables[_DUMP_NAMES] = _patterns(dump)
            title = f"run {number}, {stage}"
            steering = {**self.steering, **variables}
            try:
                run_once(self.words, folder, title=title, timeout=self.timeout, steering=steering)
            except CommandError as error:
                if not _has_drifted(folder):
                    raise
                drifted = error
            found.append(read_fits(folder, self.words))
        if found[0].keys() != found[1].keys():
            raise CommandError(
                f"The two runs left other ledgers: {', '.join(found[0])} and "
                f"{', '.join(found[1])}. Each run must fit the same models in the same order."
            )
        pairs = [
            RunPair(
                name, compare_ledgers(ledger, found[1][name]), ledger, len(found[0]), tuple(dumps)
            )
            for name, ledger in found[0].items()
        ]
        pair = next((pair for pair in pairs if pair.differs), pairs[-1])
        if drifted is not None and not pair.differs:
            raise drifted
        return pair


def _patterns(name: str) -> str:
    """Return the patterns of a place and its leaves."""
    own = escape_name(name)
    return f"{own},{own}:[!:]*"


def escape_name(name: str) -> str:
    """Return the pattern that a name alone matches, but for commas: they separate patterns."""
    return re.sub(r"([*?[])", r"[\1]", name).replace(",", "?")


def _has_drifted(folder: Path) -> bool:
    """Whether a run ended because its ranks, or it and a reference, had other bits."""
    ends = [
        record
        for path in list_fits(folder)
        for ledger in (read_ledger(path),)
        for rank in ledger.files
        for record in ledger.records(rank)
        if isinstance(record, End)
    ]
    return any((end.error or "").startswith(DriftError.__name__) for end in ends)
