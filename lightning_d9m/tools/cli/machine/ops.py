"""``d9m ops``: the ops that torch leaves nondeterministic, and their replacements."""

import argparse
import sys

from lightning_d9m.ops.patches.catalog.catalog import OPS, Op, search_op
from lightning_d9m.tools.output.columns import Column, format_table, print_result
from lightning_d9m.tools.output.terminal import terminal_width

ARGUMENTS = """
name:NAME?  print all facts about this op; a name in torch's message, or a part of it, finds it, too
--json  print JSON
"""
EXAMPLE = "d9m ops index_add_"
_COLUMNS = (
    Column[Op]("op", lambda op: op.name),
    Column[Op]("status", lambda op: op.status, meaning=lambda op: op.status),
    Column[Op]("instead, or why not", lambda op: op.instead or op.reason),
)
_FACTS = (
    Column[tuple[str, str]]("", lambda fact: f"{fact[0]}:"),
    Column[tuple[str, str]]("", lambda fact: fact[1]),
)


def run(arguments: argparse.Namespace) -> int:
    """Print the catalog, or one entry of it."""
    # In a pipe, each row of the catalog is one line.
    on_terminal = sys.stdout.isatty()
    steps = []
    if arguments.name is None:
        records: object = [op.as_record() for op in OPS]
        width = terminal_width(200) if on_terminal else 0
        table = format_table(_COLUMNS, OPS, plain=False, width=width)
        if on_terminal:
            steps = [("d9m ops NAME", "prints all facts about an op")]
    else:
        op = search_op(arguments.name)
        facts = [("name", op.name), ("status", op.status), *list_op_facts(op)]
        records = op.as_record()
        table = format_table(_FACTS, facts, plain=False, width=terminal_width())
    lines = table.splitlines()
    print_result(arguments.format, records, lines, steps=steps)
    return 0


def list_op_facts(op: Op) -> list[tuple[str, str]]:
    """Return the facts about an op, as pairs of a label and a sentence."""
    facts = [
        ("torch's name", ", ".join(op.documented)),
        ("in messages", ", ".join(op.alerts)),
        ("with the flag on, torch", op.torch_does),
        ("why", op.cause),
        ("instead", op.instead),
        ("bits", op.bits),
        ("no patch because", op.reason),
        ("needed", f"from torch {op.since}" + (f" until {op.until}" if op.until else "")),
        ("overloads", ", ".join(f"aten::{overload}" for overload in sorted(op.kernels))),
    ]
    return [(label, text) for label, text in facts if text]
