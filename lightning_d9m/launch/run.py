"""One run of the user's command, in its own folder, and the ledgers that it leaves there.

Processes that fit in parallel (joblib, Ray, Optuna) take the numbers of their ledgers in any order,
so the content pairs the fits of two runs: seed, ordinal within the process, model, data and the
initial digests. Fits that begin alike, such as the folds of a cross-validation, are paired by how
they end. Where the initial digests differ too, seed, ordinal, model and data decide.
"""

import json
import os
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, count
from pathlib import Path
from types import MappingProxyType
from typing import Any

from lightning_d9m.errors import CommandError, LedgerError, file_errors
from lightning_d9m.launch.interruption_points import INTERRUPT, RESUME
from lightning_d9m.launch.processes import describe_command, make_rank_variables, run_processes
from lightning_d9m.launch.progress import RunProgress
from lightning_d9m.ledger.folder import Ledger, list_evaluations, list_fits, read_ledger
from lightning_d9m.ledger.format.records import Digests, Json, RunFacts

_LEVELS = 4  # keys by which a fit finds its counterpart
LEDGER_VARIABLE = "LIGHTNING_D9M_LEDGER_DIR"


def make_output(chosen: Path | None, parent: str = "d9m-runs", prefix: str = "") -> Path:
    """Create a new folder; an existing one is an error.

    Without a chosen one it is the next free number in ``parent``, after ``prefix``.

    Raises:
        LedgerError: If it exists already or cannot be created.
    """
    numbered = (Path(parent, f"{prefix}{number:03d}") for number in range(1000))
    for folder in numbered if chosen is None else [chosen]:
        what = f"The folder {folder} cannot be made"
        advice = "Give another with --output."
        with file_errors(LedgerError, what, advice), suppress(FileExistsError):
            folder.mkdir(parents=True)
            return folder.resolve()
    if chosen is None:
        raise LedgerError(
            f"{parent} holds 1000 repetitions already. Remove old ones, or give a new folder with "
            "--output."
        )
    raise LedgerError(
        f"The folder {chosen} exists already, and nothing is overwritten. Give a new one with "
        "--output, or remove it."
    )


@dataclass(frozen=True)
class Run:
    """The ledgers of one run.

    Attributes:
        fits: Its ledgers by name (``fit-000``), in order. An evaluation outside a fit has one too.
        label: Description of the run, printed with its number; empty for none.
        processes: The number of processes that trained; None if the command decided.
        seconds: How long it took; None if it was not measured.
        failure: Why it failed; None if it did not.
    """

    fits: Mapping[str, Ledger]
    label: str = ""
    processes: int | None = None
    seconds: float | None = None
    failure: CommandError | None = None


def run_once(
    command: Sequence[str],
    folder: Path,
    *,
    progress: RunProgress,
    timeout: float | None,
    variables: Mapping[str, str] = MappingProxyType({}),
    working_folder: Path | None = None,
    killed_when: Callable[[], bool] = lambda: False,
    processes: int | None = None,
) -> None:
    """Run the command once, in a process that writes its ledgers to ``folder``.

    Args:
        command: The command.
        folder: The run's folder.
        progress: Shows the progress of the run.
        timeout: Seconds after which the run counts as hanging.
        variables: Further environment variables of the process.
        working_folder: Where the command runs; None for the working folder of this process.
        killed_when: Condition under which the process is killed without counting as a failure.
        processes: Starts the command so many times at once, as the ranks of one training; None
            starts it once, without variables for ranks.

    Raises:
        CommandError: If the command fails.
    """
    environment = _make_environment(folder) | dict(variables)
    ranks = [{}] if processes is None else make_rank_variables(processes)
    environments = {
        folder / (f"output-{rank}.log" if rank else "output.log"): environment | own
        for rank, own in enumerate(ranks)
    }
    with progress:
        run_processes(
            command,
            environments,
            timeout=timeout,
            tick=progress.tick,
            folder=working_folder,
            killed_when=killed_when,
        )


@dataclass
class Runs:
    """Runs of a command, each in its own folder.

    Attributes:
        command: The command.
        output: Parent folder of all runs.
        timeout: Seconds after which a run counts as hanging.
        evaluations: Whether to read the ledgers of evaluations too.
        fits: The ledgers of the first run; those of later ones get the names of their counterparts.
        seconds: How long the last run took that did not fail; None before.
    """

    command: Sequence[str]
    output: Path
    timeout: float | None = None
    evaluations: bool = True
    fits: Mapping[str, Ledger] = field(default_factory=dict)
    seconds: float | None = None

    def run(
        self,
        name: str,
        title: str,
        *,
        command: Sequence[str] = (),
        may_fail: bool = False,
        **options: Any,
    ) -> Run:
        """Run the command once.

        Args:
            name: The name of the run's folder.
            title: Name of the run, for the progress line.
            command: Another form of the command; empty for that of all runs.
            may_fail: Whether to return a failure, with the ledgers that are there.
            **options: Further arguments of ``run_once``.

        Raises:
            CommandError: If the command fails or leaves no ledger.
            LedgerError: If a ledger cannot be read.
        """
        folder, command = self.output / name, command or self.command
        with file_errors(LedgerError, f"The folder {folder} cannot be made"):
            folder.mkdir(exist_ok=True)
        failure: CommandError | None = None
        start = time.monotonic()
        progress = RunProgress(title, folder, self.seconds)
        try:
            run_once(command, folder, progress=progress, timeout=self.timeout, **options)
        except CommandError as error:
            failure = error
        seconds = time.monotonic() - start
        paths = [*list_fits(folder), *(list_evaluations(folder) if self.evaluations else ())]
        fits = {path.name: read_ledger(path) for path in paths}
        if not fits and failure is None:
            failure = CommandError(
                f"The command {describe_command(command)} ended well but wrote no ledger. Let it "
                "fit a model with a Trainer of Lightning, in the environment in which "
                "lightning_d9m is installed; where LIGHTNING_D9M is 0, with "
                "lightning_d9m.DeterminismCallback() in Trainer(callbacks=[...]). Any other loop "
                "needs an optimizer of torch or a "
                f"Recorder. Log: {folder / 'output.log'}."
            )
        if failure is None:
            self.seconds = seconds
        elif not may_fail:
            raise failure
        self.fits = self.fits or fits
        return Run(pair_fits(self.fits, fits), seconds=seconds, failure=failure)


def _make_environment(folder: Path) -> dict[str, str]:
    """Return the variables of a run: where its ledgers go, and a fixed hash seed."""
    inherited = {name: os.environ[name] for name in os.environ.keys() - {INTERRUPT, RESUME}}
    variables = {**inherited, LEDGER_VARIABLE: str(folder)}
    # Control programs that do not mention us. An explicit LIGHTNING_D9M=0 is respected.
    variables.setdefault("LIGHTNING_D9M", "1")
    # Python reads it when it starts; a random seed changes the order of sets of strings by run.
    if not variables.get("PYTHONHASHSEED", "").isdigit():
        variables["PYTHONHASHSEED"] = "0"
    return variables


def read_runs(output: Path) -> dict[int, Run]:
    """Return the runs that `d9m repeat` left in a folder, by number; empty if it is not one.

    Raises:
        LedgerError: If a ledger cannot be read.
    """
    runs: dict[int, Run] = {}
    for folder in sorted(output.glob("run-[0-9][0-9][0-9]")):
        fits = {path.name: read_ledger(path) for path in list_fits(folder)}
        if fits:
            fits = pair_fits(runs[1].fits, fits) if 1 in runs else fits
            runs[int(folder.name[4:])] = Run(fits)
    return runs if 1 in runs else {}


def pair_fits(expected: Mapping[str, Ledger], actual: Mapping[str, Ledger]) -> dict[str, Ledger]:
    """Return the ledgers of ``actual`` under the names of their counterparts in ``expected``.

    Ledgers whose contents match none are paired by name. A ledger without a counterpart gets a name
    that ``expected`` does not have.

    Raises:
        LedgerError: If a record is malformed or was edited.
    """
    ordinals = [{name: fit.header.fit for name, fit in fits.items()} for fits in (expected, actual)]
    if ordinals[0] == ordinals[1] and len(set(ordinals[0].values())) == len(expected):
        return dict(actual)  # one process wrote them all, in order
    keys = [
        {name: _list_keys(name, fit) for name, fit in fits.items()} for fits in (expected, actual)
    ]
    pairs: dict[str, str] = {}
    for level in range(_LEVELS):
        taken = set(pairs.values())
        waiting: dict[Hashable, list[str]] = defaultdict(list)
        for name, own in keys[1].items():
            if name not in taken:
                waiting[own[level]].append(name)
        for name, own in keys[0].items():
            if name not in pairs and (names := waiting[own[level]]):
                # Of several with the same key, one of the same name is preferred.
                pairs[name] = names.pop(names.index(name) if name in names else 0)
    paired = {name: actual[pairs[name]] for name in expected if name in pairs}
    for name in sorted(actual.keys() - set(pairs.values())):
        free = (f"{_kind(name)}-{number:03d}" for number in count())
        taken = expected.keys() | paired.keys()
        paired[next(own for own in chain([name], free) if own not in taken)] = actual[name]
    return paired


def _list_keys(name: str, ledger: Ledger) -> list[Hashable]:
    """Return the keys by which a fit finds its counterpart, the most exact first."""
    facts: list[Json] = []
    totals: list[Json] = []
    for record in ledger.line_records(min(ledger.files)):
        if isinstance(record, RunFacts):
            facts.append(record.as_record())
        elif isinstance(record, Digests):
            totals = [*totals[:1], record.totals]
    content = (json.dumps(part, sort_keys=True) for part in (facts, totals[:1], totals[-1:]))
    key = (_kind(name), ledger.header.seed, ledger.header.fit, *content)
    # Without the last digests, without the initial ones, by name alone.
    return [key, key[:-1], key[:-2], name]


def _kind(name: str) -> str:
    return name.rpartition("-")[0]
