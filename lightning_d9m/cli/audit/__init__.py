"""``d9m audit``: measure the nondeterminism of ops and trainings, and its cost.

The words of a command come in; its report goes out as text, JSON, Markdown and plots. Each command
has a file. Read ``ops.py`` first.
"""

import argparse
from importlib import import_module

_COMMANDS = {
    "ops": "measure every op that is, or is documented as, nondeterministic",
    "model": "measure the spread of several trainings without and with determinism",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``d9m audit`` and of its commands."""
    commands = parser.add_subparsers(dest="audit", metavar="WHAT", required=True)
    for name, summary in _COMMANDS.items():
        imported = import_module(f"lightning_d9m.cli.audit.{name}")
        command = commands.add_parser(name, help=summary, description=f"{summary.capitalize()}.")
        imported.add_arguments(command)
        command.set_defaults(audit_run=imported.run, parser=command)


def run(arguments: argparse.Namespace) -> int:
    """Run the chosen command."""
    return int(arguments.audit_run(arguments))
