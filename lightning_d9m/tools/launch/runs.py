"""Runs of the user's command, and the ledgers that each leaves in its folder.

Processes that fit in parallel (joblib, Ray, Optuna) take the numbers of their ledgers in any order,
so the content pairs the fits of two runs: seed, ordinal within the process, model, data and the
initial digests. Fits that begin alike, such as the folds of a cross-validation, are paired by how
they end. Where the initial digests differ too, seed, ordinal, model and data decide.
"""

import json
import os
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from itertools import chain, count
from pathlib import Path
from typing import Any

from lightning_d9m.engine.control.settings import Settings, build_from_variables, read_settings
from lightning_d9m.engine.ledger.folder import Ledger, list_evaluations, list_fits, read_ledger
from lightning_d9m.engine.ledger.format.records import Digests, Json, RunFacts
from lightning_d9m.errors import CommandError, LedgerError, file_errors
from lightning_d9m.tools.launch.processes import describe_command, run_beside, run_once
from lightning_d9m.tools.launch.progress import RunProgress


def make_output(chosen: Path | None) -> Path:
    """Create a new folder; an existing one is an error.

    Without a chosen one it is the next free number in ``d9m-runs``; if that is new, git ignores it.

    Raises:
        LedgerError: If it exists already or cannot be created.
        SettingError: If a variable has a value that would end the command that is to run.
    """
    build_from_variables(Settings, read_settings(Settings, os.environ))
    parent = Path("d9m-runs")
    numbered = (parent / f"{number:03d}" for number in count())
    is_first = chosen is None and not parent.exists()
    if chosen is None:  # a link that leads nowhere would refuse each number
        with file_errors(LedgerError, f"The folder {parent} cannot be made", "Use --output."):
            parent.mkdir(exist_ok=True)
    for folder in numbered if chosen is None else [chosen]:
        what = f"The folder {folder} cannot be made"
        advice = "Give another with --output."
        with file_errors(LedgerError, what, advice), suppress(FileExistsError):
            # Two commands may start at once: the number is theirs whose mkdir succeeds.
            folder.mkdir(parents=True)
            if is_first:
                parent.joinpath(".gitignore").write_text("*\n", encoding="utf-8")
            return folder.resolve()
    raise LedgerError(
        f"The folder {chosen} exists already, and nothing is overwritten. Give a new one with "
        "--output, or remove it."
    )


@dataclass(frozen=True)
class RunResult:
    """The ledgers of one run.

    Attributes:
        fits: Its ledgers by name (``fit-000``), in order. An evaluation outside a fit has one too.
        processes: The number of processes that trained; None if the command decided.
        seconds: How long it took; None if it was not measured.
        failure: Why it failed, or why its ledgers cannot be read; None if neither.
    """

    fits: Mapping[str, Ledger]
    processes: int | None = None
    seconds: float | None = None
    failure: CommandError | LedgerError | None = None


@dataclass
class Runs:
    """Runs of a command, each in its own folder.

    Attributes:
        command: The command.
        output: Parent folder of all runs.
        timeout: Seconds after which a run counts as hanging.
        fits: The ledgers of the first run; those of later ones get the names of their counterparts.
        seconds: How long the last run took that did not fail; None before.
    """

    command: Sequence[str]
    output: Path
    timeout: float | None = None
    fits: Mapping[str, Ledger] = field(default_factory=dict)
    seconds: float | None = None

    def run(
        self,
        name: str,
        title: str,
        *,
        command: Sequence[str] = (),
        may_fail: bool = False,
        later: int = 0,
        killed_when: Callable[[], bool] = lambda: False,
        **options: Any,
    ) -> RunResult:
        """Run the command once.

        Args:
            name: The name of the run's folder.
            title: Name of the run, for the progress line.
            command: Another form of the command; empty for that of all runs.
            may_fail: Whether to return a failure, with the ledgers that are there.
            later: The number of runs that follow, for the time that is left.
            killed_when: As in ``run_once``.
            **options: Further arguments of ``run_once``.

        Raises:
            CommandError: If the command fails or leaves no ledger.
            LedgerError: If a ledger cannot be read.
        """
        folder, command = self._make_folder(name), command or self.command
        failure: CommandError | None = None
        start = time.monotonic()
        progress = RunProgress(title, folder, self.seconds or 0.0, later)
        options |= {"killed_when": killed_when, "timeout": self.timeout}
        try:
            run_once(command, folder, progress=progress, **options)
        except CommandError as error:
            failure = error
            with suppress(OSError):  # a command that did not start leaves nothing, not a folder
                folder.rmdir()
                self.output.rmdir()
        was_killed, seconds = killed_when(), time.monotonic() - start
        run = self._collect(folder, seconds, failure, command, was_killed=was_killed)
        if run.failure is not None and not may_fail:
            raise run.failure
        return run

    def run_beside(
        self,
        names: Sequence[str],
        title: str,
        variables: Sequence[Mapping[str, str]],
        killed_when: Callable[[], bool],
    ) -> list[RunResult]:
        """Run the command twice, see ``run_beside``; runs may fail.

        Raises:
            CommandError: If the command does not start.
        """
        folders = [self._make_folder(name) for name in names]
        start = time.monotonic()
        failures = run_beside(
            self.command,
            folders,
            progress=RunProgress(title, folders[0], self.seconds or 0.0),
            timeout=self.timeout,
            variables=variables,
            killed_when=killed_when,
        )
        was_killed, seconds = killed_when(), time.monotonic() - start
        return [
            self._collect(folder, seconds, failure, self.command, was_killed=was_killed)
            for folder, failure in zip(folders, failures, strict=True)
        ]

    def _make_folder(self, name: str) -> Path:
        folder = self.output / name
        with file_errors(LedgerError, f"The folder {folder} cannot be made"):
            folder.mkdir(exist_ok=True)
        return folder

    def _collect(
        self,
        folder: Path,
        seconds: float,
        failure: CommandError | None,
        command: Sequence[str],
        *,
        was_killed: bool,
    ) -> RunResult:
        """Return the ledgers that a run has left in its folder."""
        try:
            # The header may be missing where a command has ended early.
            fits = _read_fits(folder, are_whole=not was_killed and failure is None)
            # The first run names the fits, and later ones are paired with it.
            paired = pair_fits(self.fits or fits, fits)
        except LedgerError as error:
            # The log of a run that failed says more than the ledger that it left.
            return RunResult({}, seconds=seconds, failure=failure or error)
        if not fits and failure is None:
            failure = CommandError(
                f"The command {describe_command(command)} ended well but wrote no ledger. Let it "
                "fit a model with a Trainer of Lightning, in the environment in which "
                "lightning_d9m is installed; where LIGHTNING_D9M is 0, with "
                "lightning_d9m.DeterminismCallback() in Trainer(callbacks=[...]). Any other loop "
                "needs an optimizer of torch or a Recorder, and one that is saved and resumed "
                "needs a Recorder or Transformers' Trainer with TransformersCallback. Log: "
                f"{folder / 'output.log'}."
            )
        if failure is None:
            self.seconds = seconds
        self.fits = self.fits or fits
        return RunResult(paired, seconds=seconds, failure=failure)


def _read_fits(folder: Path, *, are_whole: bool = True) -> dict[str, Ledger]:
    """Return the ledgers of a run by name; those that cannot be read are left out or an error.

    An evaluation outside of a fit has a ledger of the same form.
    """
    fits = dict[str, Ledger]()
    for path in (*list_fits(folder), *list_evaluations(folder)):
        with nullcontext() if are_whole else suppress(LedgerError):
            fits[path.name] = read_ledger(path)
    return fits


def read_runs(output: Path) -> dict[int, RunResult]:
    """Return the runs that `d9m repeat` left in a folder, by number; empty if it is not one.

    Raises:
        LedgerError: If a ledger cannot be read.
    """
    runs: dict[int, RunResult] = {}
    for folder in sorted(output.glob("run-[0-9][0-9][0-9]")):
        if fits := _read_fits(folder):
            fits = pair_fits(runs[1].fits, fits) if 1 in runs else fits
            runs[int(folder.name[4:])] = RunResult(fits)
    return runs if 1 in runs else {}


def pair_fits(expected: Mapping[str, Ledger], actual: Mapping[str, Ledger]) -> dict[str, Ledger]:
    """Return the ledgers of ``actual`` under the names of their counterparts in ``expected``.

    Ledgers whose contents match none are paired by name. A ledger without a counterpart gets a name
    that ``expected`` does not have.

    Raises:
        LedgerError: If a record is malformed or was edited.
    """
    # Content is read only where the order is not known: it takes the first and the last records of
    # each ledger.
    ordinals = [{name: fit.header.fit for name, fit in fits.items()} for fits in (expected, actual)]
    if ordinals[0] == ordinals[1] and len(set(ordinals[0].values())) == len(expected):
        return dict(actual)  # one process wrote them all, in order
    keys = [
        {name: _list_keys(name, fit) for name, fit in fits.items()} for fits in (expected, actual)
    ]
    pairs: dict[str, str] = {}
    left = dict(keys[1])
    for level in range(4):  # of the keys by which a fit finds its counterpart
        for name, levels in keys[0].items():
            names = [other for other, own in left.items() if own[level] == levels[level]]
            # A fit that found its counterpart by a more exact key keeps it.
            if names and name not in pairs:
                # Of several with the same key, one of the same name is preferred.
                pairs[name] = name if name in names else names[0]
                del left[pairs[name]]
    paired = {name: actual[pairs[name]] for name in expected if name in pairs}
    for name in sorted(left):
        # It must not take the name of a fit that it does not match.
        free = (f"{_kind(name)}-{number:03d}" for number in count())
        taken = expected.keys() | paired.keys()
        paired[next(new for new in chain([name], free) if new not in taken)] = actual[name]
    return paired


def _list_keys(name: str, ledger: Ledger) -> list[Hashable]:
    """Return the keys by which a fit finds its counterpart, the most exact first."""
    facts: list[Json] = []
    totals: list[Json] = []
    for record in ledger.line_records(min(ledger.files)):
        if isinstance(record, RunFacts):
            facts.append(record.as_record())
        elif isinstance(record, Digests):
            # The initial digests and the latest ones.
            totals = [*totals[:1], record.totals]
    content = (json.dumps(part, sort_keys=True) for part in (facts, totals[:1], totals[-1:]))
    # Digests of the beginning and of the end tell apart fits with equal settings, such as the folds
    # of a cross-validation.
    key = (_kind(name), ledger.header.seed, ledger.header.fit, *content)
    # Without the last digests, without the initial ones, by name alone.
    return [key, key[:-1], key[:-2], name]


def _kind(name: str) -> str:
    return name.rpartition("-")[0]
