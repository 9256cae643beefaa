"""The command ``d9m``: its parser, and nothing that loads torch.

Exit status of every command: 0 equal or in order, 1 different or something found, 2 misuse.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from lightning_d9m import __version__
from lightning_d9m.errors import D9mError

_COMMANDS = {
    "repeat": "run a command several times and say whether the runs agree bit for bit",
    "compare": "compare two ledgers and name the first divergence",
    "doctor": "what on this machine would make a run nondeterministic, and the fix",
    "ops": "the operations that torch leaves nondeterministic, and what is done about each",
    "install-horovod": "build Horovod for the torch that is installed",
}


def build_parser() -> argparse.ArgumentParser:
    """Build the parser with all commands; each lives in the adapter that its name says."""
    parser = argparse.ArgumentParser(
        prog="d9m",
        description="Deterministic training with PyTorch Lightning: prove it, compare it, fix it.",
        epilog="Exit status: 0 equal or in order, 1 different or something found, 2 misuse.",
    )
    parser.add_argument("--version", action="version", version=f"d9m {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, summary in _COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=f"{summary.capitalize()}.")
        adapter = import_module(f"lightning_d9m.adapters.{name.replace('-', '_')}")
        adapter.add_arguments(command)
        command.set_defaults(run=adapter.run)
    return parser


def main(words: Sequence[str] | None = None) -> int:
    """Run ``d9m`` on ``words`` (the process's own arguments by default) and return its status."""
    arguments = build_parser().parse_args(words)
    try:
        return int(arguments.run(arguments))
    except D9mError as error:
        print(f"d9m: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("d9m: interrupted.", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of a pipe has gone (`d9m compare ... | head`): no error of ours.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
