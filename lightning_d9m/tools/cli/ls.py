"""``d9m ls``: list the ledgers under a folder."""

import argparse
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning_d9m.errors import LedgerError
from lightning_d9m.text import escape
from lightning_d9m.tools.comparison.found_ledgers import FoundLedger, search_ledgers
from lightning_d9m.tools.comparison.ledgers import compare_ledgers
from lightning_d9m.tools.launch.progress import show_progress
from lightning_d9m.tools.output.columns import Column, format_table, print_result
from lightning_d9m.tools.output.repeat_text import RunRow, list_run_columns, make_run_row

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
            rows.append(_make_row(number, entry, before[-1] if before else None))
            if progress is not None:
                progress(len(rows))
    columns: list[Column[RunRow]] = [
        Column("ledger", lambda row: escape(row["ledger"], 400)),
        Column("date", lambda row: escape(row["created"][5:16].replace("T", " "))),
        *list_run_columns(rows)[1:],
        Column("end", lambda row: row["end"].removeprefix("finished")),
    ]
    table = format_table(columns, rows, plain=False).splitlines()
    problems = (escape(row["problem"], 400) for row in rows if row["problem"])
    print_result(arguments.format, rows, [*table, *problems])
    return 0


def _make_row(number: int, entry: FoundLedger, before: FoundLedger | None) -> RunRow:
    """Return the row of a ledger, whose verdict is that of a comparison with the one before.

    Its ``problem`` says why the ledger cannot be read. Its ``end`` is ``"finished"``, ``"failed"``,
    or ``"none"`` for a run that was killed or still runs.
    """
    facts: dict[str, Any] = {"ledger": str(entry.path), "created": entry.created, "end": ""}
    facts |= {"command": "", "commit": None, "before": None, "problem": entry.problem or None}
    if entry.ledger is not None:
        program = entry.ledger.header.program
        facts |= {"command": program.get("command", ""), "commit": program.get("git.commit")}
        try:
            end, verdict = entry.ledger.outcome(min(entry.ledger.files)).end, ""
            facts["end"] = "none" if end is None else end.status
            if before is not None and before.ledger is not None:
                with suppress(LedgerError):  # the line of the one before says why
                    verdict = compare_ledgers(before.ledger, entry.ledger).verdict
                    facts["before"] = str(before.path)
            return {**make_run_row(number + 1, entry.kind, entry.ledger, verdict), **facts}
        except LedgerError as error:
            facts["problem"] = str(error)
    empty = dict.fromkeys(("seed", "weights", "loss", "loss_hex"), "") | {"processes": None}
    return {"run": number + 1, "fit": entry.kind, **empty, "verdict": "invalid", **facts}
