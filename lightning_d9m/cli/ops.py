"""``d9m ops``: the ops that torch leaves nondeterministic, and their replacements."""

import argparse
import json
import sys

from lightning_d9m.output.op_listing import render_markdown, render_op
from lightning_d9m.output.terminal import format_next_steps
from lightning_d9m.patches.catalog.catalog import OPS, find_op

ARGUMENTS = """
name:NAME?  print all facts about this op
--json  print JSON
| --markdown  print the documentation's page
"""


def run(arguments: argparse.Namespace) -> int:
    """Print the catalog, or one entry of it."""
    from lightning_d9m.output.terminal import make_table, measure, render, style, terminal_width

    ops = OPS if arguments.name is None else (find_op(arguments.name),)
    if arguments.json:
        records = [op.as_record() for op in ops]
        print(json.dumps(records if arguments.name is None else records[0], indent=2))
    elif arguments.markdown:
        print(render_markdown(ops), end="")
    elif arguments.name is None:
        table = make_table(
            ["op", "status", "instead, or why not"],
            [(op.name, style(op.status), op.instead or op.reason) for op in ops],
        )
        # In a pipe, each row is one line.
        print(render(table, terminal_width(200) if sys.stdout.isatty() else measure(table)))
        if sys.stdout.isatty():
            print("\n".join(format_next_steps([("d9m ops NAME", "prints all facts about an op")])))
    else:
        print(render_op(ops[0], terminal_width()))
    return 0
