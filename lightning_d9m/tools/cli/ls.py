"""``d9m ls``: list the ledgers under a folder."""

import argparse
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path, PurePath
from typing import Any

from lightning_d9m.engine.ledger.folder import FoundLedger, search_ledgers
from lightning_d9m.errors import LedgerError
from lightning_d9m.text import cut_digests, escape, printable
from lightning_d9m.tools.comparison.ledgers import compare_ledgers
from lightning_d9m.tools.launch.progress import show_progress
from lightning_d9m.tools.output.columns import Column, format_table, print_result
from lightning_d9m.tools.output.repeat_text import RunRow
from lightning_d9m.tools.output.terminal import terminal_width

_COMMIT = 6
ARGUMENTS = """
folder:FOLDER?  folder to search (default: the working folder)
-n, --last N  list only the last N ledgers
--json  print a JSON list instead of a table
"""
EXAMPLE = "d9m ls lightning_logs"
SETTINGS = {"folder": {"default": Path()}}


def run(arguments: argparse.Namespace) -> int:
    """List the ledgers, oldest first, and return 0."""
    found = search_ledgers(arguments.folder)
    first = 0 if arguments.last is None else max(0, len(found) - arguments.last)
    rows = []
    with show_progress("ledgers read") as progress:
        for number, entry in enumerate(found[first:], start=first):
            before = [other for other in found[:number] if other.precedes(entry)]
            rows.append(_make_row(entry, before[-1] if before else None))
            if progress is not None:
                progress(len(rows))
    print_result(arguments.format, rows, _format_rows(rows, terminal_width()))
    return 0


def _make_row(entry: FoundLedger, before: FoundLedger | None) -> RunRow:
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
    is_initial = last is not None and last.moment == "initial"
    commit, dirty = header.program.get("git.commit"), header.program.get("git.dirty")
    row |= {
        "program": _name_program(command),
        "command": command,
        "seed": header.seed,
        "epochs": 0 if last is None else last.epoch + (last.moment in ("epoch", "final")),
        "status": "no end" if end is None else end.status,
        # Initial weights are not a result.
        "weights": "" if last is None or is_initial else last.totals.get("weights", ""),
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
    words = command.split()[1:]
    words = words[words[:1] == ["-m"] :]
    return PurePath(words[0]).name if words else ""


def _format_rows(rows: Sequence[RunRow], width: int) -> list[str]:
    """Lay out the rows below their folders, in columns that are as wide in each folder.

    If the width is too small, the least important columns are left out.
    """
    optional = ("commit", "seed", "date")
    columns = _list_columns(rows)
    lines = format_table(columns, rows, width, plain=False, optional=optional).splitlines()
    folders: dict[Path, list[str]] = {}
    for row, line in zip(rows, lines[1:], strict=True):
        below = folders.setdefault(Path(row["ledger"]).parent, [])
        below.append(line)
        if row["problem"] is not None:
            below.append(f"  {escape(row['problem'], 400)}")
    shown = (["", printable(f"{folder}/"), *below] for folder, below in folders.items())
    return [lines[0], *chain.from_iterable(shown)]


def _list_columns(rows: Sequence[RunRow]) -> list[Column[RunRow]]:
    digests = [row["weights"] or "none" for row in rows]
    cut = dict(zip(digests, cut_digests(digests), strict=True))
    words = {"different": "differs", "not comparable": "other"}

    def column(
        title: str, cell: Callable[[RunRow], str], *, is_number: bool = False
    ) -> Column[RunRow]:
        return Column(title, lambda row: "" if row["problem"] else cell(row), is_number)

    def describe_verdict(row: RunRow) -> str:
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
        Column("verdict", describe_verdict, meaning=describe_verdict),
    ]
