"""``d9m audit``: how nondeterministic ops, trainings and inference are, and what it costs."""

import argparse
from importlib import import_module

_COMMANDS = {
    "ops": (
        "lightning_d9m.cli.audit_ops",
        "every op that is, or is said to be, nondeterministic, measured on this machine",
    ),
    "model": (
        "lightning_d9m.cli.audit_model",
        "the spread of several trainings, without determinism and with it",
    ),
    "inference": (
        "lightning_d9m.cli.audit_inference",
        "whether a model is repeatable, and a sample's output independent of its batch",
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the words of ``d9m audit`` and of its commands."""
    commands = parser.add_subparsers(dest="audit", metavar="WHAT", required=True)
    for name, (module, summary) in _COMMANDS.items():
        adapter = import_module(module)
        command = commands.add_parser(name, help=summary, description=f"{summary.capitalize()}.")
        adapter.add_arguments(command)
        command.set_defaults(audit_run=adapter.run, refuse=command.error)


def run(arguments: argparse.Namespace) -> int:
    """Run the chosen command."""
    return int(arguments.audit_run(arguments))
