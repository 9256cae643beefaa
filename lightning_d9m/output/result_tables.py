"""The rows and columns of results: repeated runs, ledgers, the distances of layers.

The fields of a row are its JSON; its columns are those of every table that shows it.
"""

import math
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path, PurePath

from lightning_d9m.comparison.ledgers import compare_ledgers
from lightning_d9m.comparison.weight_distance import (
    OTHERS,
    RESOLUTION,
    STANDARD_ERROR,
    Distance,
    DistanceSeries,
)
from lightning_d9m.errors import LedgerError
from lightning_d9m.ledger.folder import FoundLedger, Ledger
from lightning_d9m.ledger.kinds import ROOT
from lightning_d9m.output.columns import Column, format_table
from lightning_d9m.text import cut_digests, escape, printable

_COMMIT = 6
_MAX_LAYERS = 8


@dataclass(frozen=True)
class RunRow:
    """One fit of one run.

    Its table has the form of Riach's table of repeated trainings (GTC 2019, S9911).

    Attributes:
        run: Number of the run, from 1.
        fit: Number of the fit within the run, from 1.
        seed: The base seed.
        weights: Digest of the final weights, 32 hex digits; empty if the fit did not end.
        loss: The last training loss; None if there was none, or it is not finite.
        loss_hex: Its ``float.hex()``; None if there was none.
        verdict: ``"reference"`` for run 1, ``"equal"``, ``"differs"`` or ``"no match"`` for others.
        label: What distinguishes the run; empty for nothing.
        processes: Number of processes; None unless it distinguishes the runs.
        seconds: Duration of the run; None likewise.
        records: Number of records in the ledger; None likewise.
    """

    run: int
    fit: int
    seed: int
    weights: str
    loss: float | None
    loss_hex: str | None
    verdict: str
    label: str = ""
    processes: int | None = None
    seconds: float | None = None
    records: int | None = None


def make_run_row(run: int, fit: int, ledger: Ledger, verdict: str, **facts: object) -> RunRow:
    """Return the row of a fit, with further facts by their names."""
    last = ledger.outcome(min(ledger.files)).final
    written = None if last is None else last.loss
    loss = None if written is None else float.fromhex(written)
    weights = "" if last is None else last.totals.get("weights", "")
    if loss is not None and not math.isfinite(loss):
        loss = None  # JSON has no such number
    seed = ledger.header.seed
    return RunRow(run, fit, seed, weights, loss, written, verdict, **facts)  # type: ignore[arg-type]


def list_run_columns(rows: Sequence[RunRow], *, verbose: bool = False) -> list[Column[RunRow]]:
    """Return the columns of a table of these runs; losses are never cut."""
    named = [row.weights or "none" for row in rows]
    cut = dict(zip(named, named if verbose else cut_digests(named), strict=True))

    def describe_loss(row: RunRow) -> str:
        return "none" if row.loss_hex is None else repr(float.fromhex(row.loss_hex))

    columns: list[Column[RunRow]] = [Column("run", lambda row: str(row.run), is_number=True)]
    if len({row.fit for row in rows}) > 1:
        columns.append(Column("fit", lambda row: str(row.fit), is_number=True))
    weights: Column[RunRow] = Column("weights", lambda row: cut[row.weights or "none"])
    if any(row.processes is not None for row in rows):
        columns += [
            Column("processes", lambda row: str(row.processes), is_number=True),
            Column("time", lambda row: f"{row.seconds or 0.0:.1f} s", is_number=True),
            Column("records", lambda row: str(row.records), is_number=True),
            weights,
        ]
    else:
        columns += [
            Column("seed", lambda row: str(row.seed), is_number=True),
            weights,
            Column("final loss", describe_loss),
        ]
        if verbose:
            columns.append(Column("", lambda row: row.loss_hex or ""))
    return [*columns, Column("verdict", lambda row: row.verdict, has_meaning=True)]


@dataclass(frozen=True)
class LedgerRow:
    """One ledger.

    Attributes:
        ledger: Its folder.
        created: Time at which it was begun, ISO 8601 in UTC.
        program: Name of the script or module; empty if it is not recorded.
        command: The whole command.
        seed: The base seed.
        epochs: Number of epochs that are recorded.
        status: ``"finished"``, ``"failed"``, or ``"no end"`` for a run that was killed or still
            runs.
        weights: Digest of the last recorded weights, 32 hex digits.
        git_commit: The commit of the program's source; None without a repository.
        git_dirty: Whether the source differed from it.
        before: The earlier ledger that this one is compared with; None if it is the first.
        verdict: How both compare; None if it is the first.
        problem: Why the ledger cannot be read; None if it can.
    """

    ledger: str
    created: str = ""
    program: str = ""
    command: str = ""
    seed: int | None = None
    epochs: int | None = None
    status: str = ""
    weights: str = ""
    git_commit: str | None = None
    git_dirty: bool | None = None
    before: str | None = None
    verdict: str | None = None
    problem: str | None = None


def make_ledger_row(entry: FoundLedger, before: FoundLedger | None) -> LedgerRow:
    """Read a ledger and compare it with the one before."""
    path, ledger = str(entry.path), entry.ledger
    if ledger is None:
        return LedgerRow(path, problem=entry.problem)
    try:
        header, outcome = ledger.header, ledger.outcome(min(ledger.files))
    except LedgerError as error:
        return LedgerRow(path, entry.created, problem=str(error))
    last, end = outcome.last, outcome.end
    program = header.program
    command, commit, dirty = (program.get(key) for key in ("command", "git.commit", "git.dirty"))
    verdict = None
    if before is not None and before.ledger is not None:
        try:
            verdict = compare_ledgers(before.ledger, ledger).verdict
        except LedgerError:  # the line of the one before says why
            before = None
    return LedgerRow(
        ledger=path,
        created=header.created,
        program=_name_program(str(command or "")),
        command=str(command or ""),
        seed=header.seed,
        epochs=0 if last is None or last.moment == "initial" else last.epoch + 1,
        status="no end" if end is None else end.status,
        weights="" if last is None else last.totals.get("weights", ""),
        git_commit=commit if isinstance(commit, str) else None,
        git_dirty=dirty if isinstance(dirty, bool) else None,
        before=None if before is None else str(before.path),
        verdict=verdict,
    )


def _name_program(command: str) -> str:
    """Return the script or module that a command runs.

    >>> _name_program("python src/train.py --lr 1"), _name_program("python -m package.train")
    ('train.py', 'package.train')
    """
    try:
        words = shlex.split(command)[1:]
    except ValueError:  # it was cut within quotes
        words = command.split()[1:]
    if words[:1] == ["-m"]:
        return words[1] if words[1:] else ""
    return PurePath(words[0]).name if words else ""


def format_ledgers(rows: Sequence[LedgerRow], width: int) -> str:
    """Lay out the rows below their folders, in columns that are as wide in each folder.

    If the width is too small, the least important columns are left out.
    """
    optional = ("commit", "seed", "date")
    columns = _list_ledger_columns(rows)
    lines = format_table(columns, rows, width, plain=False, optional=optional).splitlines()
    folders: dict[Path, list[str]] = {}
    for row, line in zip(rows, lines[1:], strict=True):
        below = folders.setdefault(Path(row.ledger).parent, [])
        below.append(line)
        if row.problem is not None:
            below.append(f"  {escape(row.problem, 400)}")
    shown = (["", printable(f"{folder}/"), *below] for folder, below in folders.items())
    return "\n".join([lines[0], *chain.from_iterable(shown)])


def _list_ledger_columns(rows: Sequence[LedgerRow]) -> list[Column[LedgerRow]]:
    digests = [row.weights or "none" for row in rows]
    cut = dict(zip(digests, cut_digests(digests), strict=True))
    words = {"different": "differs", "not comparable": "other"}

    def describe_commit(row: LedgerRow) -> str:
        return escape((row.git_commit or "")[:_COMMIT]) + ("*" if row.git_dirty else "")

    def describe_epochs(row: LedgerRow) -> str:
        return f"{row.epochs}" if row.status == "finished" else f"{row.epochs} {row.status}"

    def describe_verdict(row: LedgerRow) -> str:
        return "invalid" if row.problem else words.get(row.verdict or "", row.verdict or "")

    def column(
        title: str, cell: Callable[[LedgerRow], str], *, is_number: bool = False
    ) -> Column[LedgerRow]:
        return Column(title, lambda row: "" if row.problem else cell(row), is_number)

    return [
        Column("ledger", lambda row: escape(Path(row.ledger).name)),
        column("date", lambda row: escape(row.created[5:16].replace("T", " "))),
        column("program", lambda row: escape(row.program)),
        column("seed", lambda row: str(row.seed), is_number=True),
        column("epochs", describe_epochs, is_number=True),
        column("weights", lambda row: cut[row.weights or "none"]),
        column("commit", describe_commit),
        Column("verdict", describe_verdict, has_meaning=True),
    ]


@dataclass(frozen=True)
class LayerRow:
    """The distances of a layer of two runs at the ends of epochs.

    Attributes:
        layer: Its name.
        epoch: The first epoch at whose end it differs.
        first: The distance there.
        last: The distance at the end.
    """

    layer: str
    epoch: int
    first: Distance
    last: Distance


LAYER_COLUMNS: tuple[Column[LayerRow], ...] = (
    Column("layer", lambda row: escape(row.layer)),
    Column("first epoch", lambda row: str(row.epoch)),
    Column("size there", lambda row: _describe_distance(row.first)),
    Column("size at the end", lambda row: _describe_distance(row.last)),
)


def list_layers(found: DistanceSeries) -> list[LayerRow]:
    """Return the layers that differ, those that differ most first, and all others as one."""
    rows = []
    for layer, own in found.list_series(_MAX_LAYERS):
        first = min(step for step in own if own[step].differing)
        name = "all other layers" if layer == OTHERS else layer or ROOT
        rows.append(LayerRow(name, found.epochs[first], own[first], own[max(own)]))
    return rows


def list_layer_lines(found: DistanceSeries) -> list[list[tuple[int, float]]]:
    """Return (step, relative distance) of each row of ``list_layers``."""
    series = found.list_series(_MAX_LAYERS)
    return [[(step, own[step].relative) for step in sorted(own)] for _, own in series]


def list_distances(found: DistanceSeries) -> list[dict[str, object]]:
    """Return the distances for ``--json``: one entry for each epoch and layer that differs."""
    return [
        {
            "epoch": found.epochs[step],
            "step": step,
            "layer": layer,
            "relative": _finite(distance.relative),
            "absolute": _finite(math.sqrt(distance.square)),
            "tensors": distance.differing,
        }
        for step in sorted(found.moments)
        for layer, distance in found.moments[step].items()
        if distance.differing
    ]


def format_distances(found: DistanceSeries, width: int) -> list[str]:
    """Return the distances for a terminal."""
    rows = list_layers(found)
    title = f"How far the weights are apart, relative to their norm (+- {STANDARD_ERROR:.0%}):"
    return ["", title, *format_table(LAYER_COLUMNS, rows, width).splitlines()] if rows else []


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _describe_distance(distance: Distance) -> str:
    if not distance.differing:
        return "equal"
    if not math.isfinite(distance.relative):
        return "not finite"
    size = distance.relative
    return f"{size:.1e}" if size >= RESOLUTION else f"below {RESOLUTION:g}"
