"""``d9m ops``: the ops that torch leaves nondeterministic, and their replacements."""

import argparse
import sys

from lightning_d9m.output.columns import print_result
from lightning_d9m.output.op_listing import render_op
from lightning_d9m.output.terminal import format_next_steps
from lightning_d9m.patches.catalog.catalog import OPS, find_op

ARGUMENTS = """
name:NAME?  print all facts about this op
--json  print JSON
"""


def run(arguments: argparse.Namespace) -> int:
    """Print the catalog, or one entry of it."""
    from lightning_d9m.output.terminal import make_table, measure, render, style, terminal_width

    ops = OPS if arguments.name is None else (find_op(arguments.name),)
    records = [op.as_record() for op in ops]
    if arguments.name is None:
        table = make_table(
            ["op", "status", "instead, or why not"],
            [(op.name, style(op.status), op.instead or op.reason) for op in ops],
        )
        # In a pipe, each row is one line.
        on_terminal = sys.stdout.isatty()
        text = render(table, terminal_width(200) if on_terminal else measure(table))
        steps = [("d9m ops NAME", "prints all facts about an op")] if on_terminal else []
        print_result(arguments.format, records, [*text.splitlines(), *format_next_steps(steps)])
    else:
        print_result(arguments.format, records[0], [render_op(ops[0], terminal_width())])
    return 0
