"""The rows and columns of results: repeated runs, ledgers, the distances of layers.

A row is a mapping, which is its JSON; its columns are those of every table that shows it.
"""

import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path, PurePath
from typing import Any, TypeAlias

from lightning_d9m.comparison.ledgers import compare_ledgers
from lightning_d9m.comparison.weight_distance import OTHERS, RESOLUTION, Distance, DistanceSeries
from lightning_d9m.errors import LedgerError
from lightning_d9m.ledger.folder import FoundLedger, Ledger
from lightning_d9m.ledger.kinds import ROOT
from lightning_d9m.output.columns import Column, format_table
from lightning_d9m.text import cut_digests, escape, printable

_COMMIT = 6
Row: TypeAlias = Mapping[str, Any]
_MAX_LAYERS = 8


def make_run_row(run: int, fit: int, ledger: Ledger, verdict: str, **facts: object) -> Row:
    """Return the row of a fit: its digest of weights, its seed and its last training loss.

    The table of such rows has the form of Riach's table of repeated trainings (GTC 2019, S9911).

    Args:
        run: Number of the run, from 1.
        fit: Number of the fit within the run, from 1.
        ledger: Its ledger.
        verdict: ``"reference"`` for run 1, ``"equal"``, ``"differs"`` or ``"no match"`` for others.
        **facts: What distinguishes the run: its label, number of processes, seconds, records.
    """
    last = ledger.outcome(min(ledger.files)).final
    written = None if last is None else last.loss
    loss = None if written is None else float.fromhex(written)
    return {
        "run": run,
        "fit": fit,
        "seed": ledger.header.seed,
        "weights": "" if last is None else last.totals.get("weights", ""),
        # JSON has no infinity and no NaN.
        "loss": loss if loss is not None and math.isfinite(loss) else None,
        "loss_hex": written,
        "verdict": verdict,
        "label": "",
        **dict.fromkeys(("processes", "seconds", "records")),
        **facts,
    }


def list_run_columns(rows: Sequence[Row], *, verbose: bool = False) -> list[Column[Row]]:
    """Return the columns of a table of these runs; losses are never cut."""
    named = [row["weights"] or "none" for row in rows]
    cut = dict(zip(named, named if verbose else cut_digests(named), strict=True))
    columns: list[Column[Row]] = [_make_column("run", is_number=True)]
    if len({row["fit"] for row in rows}) > 1:
        columns.append(_make_column("fit", is_number=True))
    weights: Column[Row] = Column("weights", lambda row: cut[row["weights"] or "none"])
    if any(row["processes"] is not None for row in rows):
        columns += [
            _make_column("processes", is_number=True),
            Column("time", lambda row: f"{row['seconds'] or 0.0:.1f} s", is_number=True),
            _make_column("records", is_number=True),
            weights,
        ]
    else:
        columns += [
            _make_column("seed", is_number=True),
            weights,
            Column(
                "final loss",
                lambda row: (
                    repr(float.fromhex(row["loss_hex"] or "nan")) if row["loss_hex"] else "none"
                ),
            ),
        ]
        if verbose:
            columns.append(Column("", lambda row: row["loss_hex"] or ""))
    return [*columns, Column("verdict", lambda row: row["verdict"], has_meaning=True)]


def _make_column(name: str, *, is_number: bool = False) -> Column[Row]:
    """Return the column of a field as it is."""
    return Column(name, lambda row: escape(row[name]), is_number)


def make_ledger_row(entry: FoundLedger, before: FoundLedger | None) -> Row:
    """Read a ledger and compare it with the one before.

    The row says under ``problem`` why the ledger cannot be read; its ``status`` is ``"finished"``,
    ``"failed"``, or ``"no end"`` for a run that was killed or still runs.
    """
    row: dict[str, Any] = {
        "ledger": str(entry.path),
        "created": entry.created,
        **dict.fromkeys(("program", "command", "status", "weights"), ""),
        **dict.fromkeys(("seed", "epochs", "git_commit", "git_dirty", "before", "verdict")),
        "problem": entry.problem or None,
    }
    if entry.ledger is None:
        return row
    header = entry.ledger.header
    try:
        outcome = entry.ledger.outcome(min(entry.ledger.files))
    except LedgerError as error:
        return row | {"problem": str(error)}
    last, end, command = outcome.last, outcome.end, str(header.program.get("command") or "")
    commit, dirty = header.program.get("git.commit"), header.program.get("git.dirty")
    row |= {
        "program": _name_program(command),
        "command": command,
        "seed": header.seed,
        "epochs": 0 if last is None or last.moment == "initial" else last.epoch + 1,
        "status": "no end" if end is None else end.status,
        "weights": "" if last is None else last.totals.get("weights", ""),
        "git_commit": commit if isinstance(commit, str) else None,
        "git_dirty": dirty if isinstance(dirty, bool) else None,
    }
    if before is not None and before.ledger is not None:
        with suppress(LedgerError):  # the line of the one before says why
            verdict = compare_ledgers(before.ledger, entry.ledger).verdict
            row |= {"before": str(before.path), "verdict": verdict}
    return row


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


def format_ledgers(rows: Sequence[Row], width: int) -> str:
    """Lay out the rows below their folders, in columns that are as wide in each folder.

    If the width is too small, the least important columns are left out.
    """
    optional = ("commit", "seed", "date")
    columns = _list_ledger_columns(rows)
    lines = format_table(columns, rows, width, plain=False, optional=optional).splitlines()
    folders: dict[Path, list[str]] = {}
    for row, line in zip(rows, lines[1:], strict=True):
        below = folders.setdefault(Path(row["ledger"]).parent, [])
        below.append(line)
        if row["problem"] is not None:
            below.append(f"  {escape(row['problem'], 400)}")
    shown = (["", printable(f"{folder}/"), *below] for folder, below in folders.items())
    return "\n".join([lines[0], *chain.from_iterable(shown)])


def _list_ledger_columns(rows: Sequence[Row]) -> list[Column[Row]]:
    digests = [row["weights"] or "none" for row in rows]
    cut = dict(zip(digests, cut_digests(digests), strict=True))
    words = {"different": "differs", "not comparable": "other"}

    def column(title: str, cell: Callable[[Row], str], *, is_number: bool = False) -> Column[Row]:
        return Column(title, lambda row: "" if row["problem"] else cell(row), is_number)

    def describe_verdict(row: Row) -> str:
        return "invalid" if row["problem"] else words.get(row["verdict"], row["verdict"] or "")

    return [
        Column("ledger", lambda row: escape(Path(row["ledger"]).name)),
        column("date", lambda row: escape(row["created"][5:16].replace("T", " "))),
        column("program", lambda row: escape(row["program"])),
        column("seed", lambda row: str(row["seed"]), is_number=True),
        column(
            "epochs",
            lambda row: f"{row['epochs']} {row['status']}".removesuffix(" finished"),
            is_number=True,
        ),
        column("weights", lambda row: cut[row["weights"] or "none"]),
        column(
            "commit",
            lambda row: escape((row["git_commit"] or "")[:_COMMIT]) + "*" * bool(row["git_dirty"]),
        ),
        Column("verdict", describe_verdict, has_meaning=True),
    ]


# The name of a layer, the first epoch at whose end it differs, the distances there and at the end.
LayerRow: TypeAlias = tuple[str, int, Distance, Distance]
LAYER_COLUMNS: tuple[Column[LayerRow], ...] = (
    Column("layer", lambda row: escape(row[0])),
    Column("first epoch", lambda row: str(row[1])),
    Column("size there", lambda row: _describe_distance(row[2])),
    Column("size at the end", lambda row: _describe_distance(row[3])),
)


def list_layers(found: DistanceSeries) -> list[LayerRow]:
    """Return the layers that differ, those that differ most first, and all others as one."""
    rows = []
    for layer, own in found.list_series(_MAX_LAYERS):
        first = min(step for step in own if own[step].differing)
        name = "all other layers" if layer == OTHERS else layer or ROOT
        rows.append((name, found.epochs[first], own[first], own[max(own)]))
    return rows


def list_layer_lines(found: DistanceSeries) -> list[list[tuple[int, float]]]:
    """Return (step, relative distance) of each row of ``list_layers``."""
    series = found.list_series(_MAX_LAYERS)
    return [[(step, own[step].relative) for step in sorted(own)] for _, own in series]


def _describe_distance(distance: Distance) -> str:
    if not distance.differing:
        return "equal"
    if not math.isfinite(distance.relative):
        return "not finite"
    size = distance.relative
    return f"{size:.1e}" if size >= RESOLUTION else f"below {RESOLUTION:g}"
