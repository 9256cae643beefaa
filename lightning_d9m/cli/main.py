"""The command ``d9m``: its parser, and nothing that loads torch.

Exit status of every command: 0 equal or in order, 1 different or something found, 2 misuse.
"""

import argparse
import os
import shutil
import sys
import textwrap
from collections.abc import Sequence
from importlib import import_module

from lightning_d9m.errors import D9mError
from lightning_d9m.text import printable
from lightning_d9m.version import __version__

_WIDEST = 100
_COMMANDS = {
    "repeat": (
        "lightning_d9m.cli.repeat",
        "run a command several times and say whether the runs agree bit for bit",
    ),
    "compare": ("lightning_d9m.cli.compare", "compare two ledgers and name the first divergence"),
    "report": ("lightning_d9m.cli.report", "write how two ledgers compare as one HTML file"),
    "locate": (
        "lightning_d9m.cli.locate",
        "find the step, rank, module and operation at which a command's runs diverge",
    ),
    "verify": (
        "lightning_d9m.cli.verify",
        "check that a checkpoint is whole, and find the epoch that it holds",
    ),
    "doctor": (
        "lightning_d9m.cli.doctor",
        "what on this machine would make a run nondeterministic, and the fix",
    ),
    "ops": (
        "lightning_d9m.cli.ops",
        "the operations that torch leaves nondeterministic, and what is done about each",
    ),
    "scan": (
        "lightning_d9m.cli.scan",
        "list what in a program's source would make its runs differ",
    ),
    "audit": (
        "lightning_d9m.cli.audit",
        "measure how nondeterministic ops, trainings and inference are here",
    ),
    "install-horovod": (
        "lightning_d9m.cli.install_horovod",
        "build Horovod for the torch that is installed",
    ),
}


def build_parser(chosen: str | None = None) -> argparse.ArgumentParser:
    """Build the parser; each command lives in the adapter that its name says.

    Args:
        chosen: The command that will run. Only its adapter is loaded, so that help comes at once.
    """
    parser = argparse.ArgumentParser(
        prog="d9m",
        description="Deterministic training with PyTorch Lightning: prove it, compare it, fix it.",
        epilog="Exit status: 0 equal or in order, 1 different or something found, 2 misuse.",
    )
    parser.add_argument("--version", action="version", version=f"d9m {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (module, summary) in _COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=f"{summary.capitalize()}.")
        if name == chosen:
            adapter = import_module(module)
            adapter.add_arguments(command)
            command.set_defaults(run=adapter.run, refuse=command.error)
    return parser


def main(words: Sequence[str] | None = None) -> int:
    """Run ``d9m`` on ``words`` (the process's own arguments by default) and return its status."""
    words = sys.argv[1:] if words is None else words
    chosen = next((word for word in words if not word.startswith("-")), None)
    arguments, unknown = build_parser(chosen).parse_known_args(words)
    if unknown:  # with the usage of the command, where argparse by itself prints that of d9m
        arguments.refuse(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        status = int(arguments.run(arguments))
        # Here, where a reader that has gone can be dealt with, not when the interpreter ends.
        sys.stdout.flush()
    except D9mError as error:
        _print_error(str(error))
        return 2
    except KeyboardInterrupt:
        print("d9m: interrupted.", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of a pipe has gone (`d9m compare ... | head`): no error of ours.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as error:
        # Not 1, which says that runs differ. `python -X dev -m lightning_d9m` shows where.
        if sys.flags.dev_mode:
            raise
        _print_error(_describe(error))
        _drop_output()
        return 2
    return status


def _print_error(text: str) -> None:
    """Print an error, on a terminal without words that are cut at its edge."""
    # It may name what others have named: a folder, a field of a ledger, a line of a log.
    lines = [printable(line) for line in f"d9m: error: {text}".splitlines()]
    if sys.stderr.isatty():
        width = min(shutil.get_terminal_size().columns, _WIDEST)
        words = textwrap.TextWrapper(width, break_long_words=False, break_on_hyphens=False)
        # What is indented is laid out already: the end of a log, two values to be compared.
        lines = [part for ln in lines for part in ([ln] if ln[:1] in ("", " ") else words.wrap(ln))]
    print("\n".join(lines), file=sys.stderr)


def _describe(error: Exception) -> str:
    """Return one line on an error that nobody foresaw."""
    text = " ".join(str(error).split())
    if isinstance(error, OSError):
        return f"{text}. Check the disk and the permissions."
    return (
        f"{type(error).__name__}: {text}. This is an error of d9m itself: please report it, with "
        "what `python -X dev -m lightning_d9m ...` prints."
    )


def _drop_output() -> None:
    """Give up what cannot be printed (a full disk, say), before the interpreter tries again."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
