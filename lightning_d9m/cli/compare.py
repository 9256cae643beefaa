"""``d9m compare``: compare two ledgers and name the first divergence."""

import argparse
import json

from lightning_d9m.cli.arguments import add_ledger_arguments
from lightning_d9m.comparison.ledgers import compare_ledgers
from lightning_d9m.ledger.folder import read_ledger
from lightning_d9m.output.comparison_json import as_json
from lightning_d9m.output.comparison_text import format_comparison
from lightning_d9m.output.progress import show_progress


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``d9m compare``."""
    add_ledger_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def run(arguments: argparse.Namespace) -> int:
    """Compare two ledgers, print the result, and return 0 if they are equal, else 1."""
    expected, actual = read_ledger(arguments.expected), read_ledger(arguments.actual)
    with show_progress("records compared") as progress:
        comparison = compare_ledgers(expected, actual, progress=progress)
    if arguments.json:
        print(json.dumps(as_json(comparison), indent=2))
    else:
        print("\n".join(format_comparison(comparison)))
    return 0 if comparison.equal else 1
