"""The table of ``d9m ls``: one line for each ledger, below the folder that holds it."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

from lightning_d9m.comparison.ledgers import compare_ledgers
from lightning_d9m.errors import LedgerError
from lightning_d9m.ledger.folder import FoundLedger
from lightning_d9m.output.terminal import make_table, measure, render, style
from lightning_d9m.text import cut_digests, escape, printable

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

_TITLES = ("ledger", "date", "program", "seed", "epochs", "weights", "commit", "verdict")
# Left out in this order if the terminal is too narrow for the programs' names.
_LEAST_IMPORTANT = ("commit", "seed", "date")
_COMMIT, _MOST_PROGRAM = 6, 80


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


def make_row(entry: FoundLedger, before: FoundLedger | None) -> LedgerRow:
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

    If the width is too small, the least important columns are left out; then the programs' names
    are cut.
    """
    parents = list(dict.fromkeys(str(Path(row.ledger).parent) for row in rows))
    table = _make_table(rows, width)
    lines = render(table, max(width, measure(table))).splitlines()
    body = dict(zip((row.ledger for row in rows), lines[1:], strict=True))
    shown = [lines[0]]
    for parent in parents:
        shown += ["", printable(f"{parent}/")]
        for row in rows:
            if str(Path(row.ledger).parent) == parent:
                shown.append(body[row.ledger])
                if row.problem is not None:
                    shown.append(f"  {escape(row.problem, 400)}")
    return "\n".join(shown)


def _make_table(rows: Sequence[LedgerRow], width: int) -> "Table":
    digests = cut_digests([row.weights or "none" for row in rows])
    cells = [_list_cells(row, weights) for row, weights in zip(rows, digests, strict=True)]
    kept = list(_TITLES)
    left_out = iter(_LEAST_IMPORTANT)
    while True:
        table = make_table(kept, [[row[title] for title in kept] for row in cells])
        for column in table.columns:
            column.no_wrap = True
        spare = width - measure(table)
        title = next(left_out, None) if spare < 0 else None
        if title is None:
            break
        kept.remove(title)
    program = table.columns[kept.index("program")]
    program.overflow = "ellipsis"
    longest = max(len(row["program"]) for row in cells)
    program.max_width = max(len("program"), longest + min(spare, 0))
    for title in {"seed", "epochs"} & set(kept):
        table.columns[kept.index(title)].justify = "right"
    return table


def _list_cells(row: LedgerRow, weights: str) -> "dict[str, str | Text]":
    name = escape(Path(row.ledger).name)
    if row.problem is not None:
        cells: dict[str, str | Text] = dict.fromkeys(_TITLES, "")
        return cells | {"ledger": name, "verdict": style("problem", "invalid")}
    commit = "" if row.git_commit is None else escape(row.git_commit[:_COMMIT])
    words = {"different": "differs", "not comparable": "other"}
    return {
        "ledger": name,
        "date": escape(row.created[5:16].replace("T", " ")),
        "program": escape(row.program, _MOST_PROGRAM),
        "seed": str(row.seed),
        "epochs": str(row.epochs) if row.status == "finished" else f"{row.epochs} {row.status}",
        "weights": weights,
        "commit": commit + ("*" if row.git_dirty else ""),
        "verdict": style(row.verdict, words.get(row.verdict, row.verdict)) if row.verdict else "",
    }
