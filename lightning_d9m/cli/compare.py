"""``d9m compare``: compare two ledgers and name the first divergence."""

import argparse
import json
from pathlib import Path

from lightning_d9m.comparison.ledgers import compare_ledgers
from lightning_d9m.ledger.folder import read_ledger
from lightning_d9m.output.comparison_json import as_json
from lightning_d9m.output.comparison_text import format_comparison
from lightning_d9m.output.progress import progress_shown


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the words of ``d9m compare``."""
    where = "a folder fit-NNN, a folder that holds exactly one, or one file rank-N.jsonl"
    parser.add_argument("expected", type=Path, help=f"ledger of the earlier run: {where}")
    parser.add_argument("actual", type=Path, help="ledger of the later run, likewise")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def run(arguments: argparse.Namespace) -> int:
    """Compare, print, and return 0 when the runs are equal, else 1."""
    expected, actual = read_ledger(arguments.expected), read_ledger(arguments.actual)
    with progress_shown() as progress:
        comparison = compare_ledgers(expected, actual, progress=progress)
    if arguments.json:
        print(json.dumps(as_json(comparison), indent=2))
    else:
        print("\n".join(format_comparison(comparison)))
    return 0 if comparison.verdict == "equal" else 1
