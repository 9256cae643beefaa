"""``d9m ls``: list the ledgers under a folder."""

import argparse
from pathlib import Path

from lightning_d9m.launch.progress import show_progress
from lightning_d9m.ledger.folder import search_ledgers
from lightning_d9m.output.columns import print_result
from lightning_d9m.output.result_tables import format_ledgers, make_ledger_row
from lightning_d9m.output.terminal import terminal_width

ARGUMENTS = """
folder:FOLDER?  folder to search (default: the working folder)
-n, --last N  list only the last N ledgers
--json  print a JSON list instead of a table
"""
SETTINGS = {"folder": {"default": Path()}}


def run(arguments: argparse.Namespace) -> int:
    """List the ledgers, oldest first, and return 0."""
    found = search_ledgers(arguments.folder)
    first = 0 if arguments.last is None else max(0, len(found) - arguments.last)
    rows = []
    with show_progress("ledgers read") as progress:
        for number, entry in enumerate(found[first:], start=first):
            before = [other for other in found[:number] if other.precedes(entry)]
            rows.append(make_ledger_row(entry, before[-1] if before else None))
            if progress is not None:
                progress(len(rows))
    lines = format_ledgers(rows, terminal_width()).splitlines()
    print_result(arguments.format, rows, lines)
    return 0
