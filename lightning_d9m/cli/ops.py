"""``d9m ops``: the ops that torch leaves nondeterministic, and their replacements."""

import argparse
import json

from lightning_d9m.patches.catalog.catalog import OPS, find_op
from lightning_d9m.patches.catalog.listing import render_markdown, render_op, render_table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``d9m ops``."""
    parser.add_argument("name", nargs="?", metavar="NAME", help="print all facts about this op")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON")
    form.add_argument("--markdown", action="store_true", help="print the documentation's page")


def run(arguments: argparse.Namespace) -> int:
    """Print the catalog, or one entry of it."""
    ops = OPS if arguments.name is None else (find_op(arguments.name),)
    if arguments.json:
        records = [op.as_record() for op in ops]
        print(json.dumps(records if arguments.name is None else records[0], indent=2))
    elif arguments.markdown:
        print(render_markdown(ops), end="")
    elif arguments.name is None:
        print(render_table(ops))
    else:
        print(render_op(ops[0]))
    return 0
