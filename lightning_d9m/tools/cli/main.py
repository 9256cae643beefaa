"""The ``d9m`` command: its parser and its handling of errors, without loading torch.

Exit status of every command: 0 equal or no findings, 1 different or findings, 2 an error, 3 a
command that it ran failed, such as the training, or a ledger was cut off.
"""

import argparse
import os
import re
import shutil
import signal
import sys
import textwrap
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from importlib import import_module
from types import ModuleType
from typing import NoReturn

from lightning_d9m.errors import CommandError, D9mError
from lightning_d9m.tools.cli.arguments import declare_command
from lightning_d9m.tools.output.terminal import print_error
from lightning_d9m.version import __version__

_MAX_WIDTH = 100  # as of tables: longer lines are hard to read
_MACHINE = "What is on this machine?"  # those of the folder `machine`
# By the question that a group of commands answers: each command, and its summary.
_GROUPS = {
    "Is a training deterministic?": {
        "repeat": "run a command several times and compare the runs bit for bit",
        "compare": "compare two ledgers and name the first divergence",
        "check": "run parts of a training again and compare them with its ledger",
        "prove": "write one file with which a stranger can check a training",
        "ls": "list ledgers, each compared with the one before it",
        "verify": "check that a checkpoint is whole and find it in a ledger",
    },
    "Why does it differ?": {
        "locate": "find the step, rank, module and op at which runs diverge",
        "bisect": "find the git commit that changed the bits of a training",
        "scan": "find code in a program that makes its runs differ",
        "goto": "return to a step of a run, in a debugger or with a trace of it",
        "report": "write the comparison of two ledgers as one HTML file",
        "bundle": "pack two ledgers and the cause of their difference for a bug report",
    },
    _MACHINE: {
        "doctor": "check this machine for what makes runs nondeterministic",
        "ops": "list the ops that torch leaves nondeterministic",
        "audit": "measure the nondeterminism of ops",
        "install-horovod": "build Horovod for the installed torch",
        "completion": "print the script with which your shell completes commands",
    },
}
COMMANDS = {name: summary for group in _GROUPS.values() for name, summary in group.items()}
_EXAMPLES = """\
examples:
  d9m repeat -- python train.py    run it twice; are the weights equal?
  d9m locate -- python train.py    which step, module and op differ?
  d9m scan                         which lines can make runs differ?

exit status: 0 equal or no findings, 1 different or findings, 2 an error,
  3 a command that it ran failed, such as the training, or a ledger was cut off
"""
_ERROR, _FAILED = 2, 3
_TRAINING = "\n-- COMMAND"


class _CommandParser(argparse.ArgumentParser):
    """The parser of one command."""

    def error(self, message: str) -> NoReturn:
        """Exit with the error, which stands above the usage."""
        self.exit(_ERROR, f"{self.prog}: error: {message}\n{self.format_usage()}")


class _Parser(_CommandParser):
    """The parser of ``d9m``, whose help lists the commands in groups."""

    def format_help(self) -> str:
        width = min(shutil.get_terminal_size().columns, _MAX_WIDTH)
        lines = ["usage: d9m [-h] [--version] COMMAND ...", "", self.description or ""]
        column = max(map(len, COMMANDS)) + 4
        # Without rich, so that help is fast.
        plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
        bold = "{}" if plain or not sys.stdout.isatty() else "\x1b[1m{}\x1b[0m"
        for title, commands in _GROUPS.items():
            lines += ["", bold.format(title)]
            for name, summary in commands.items():
                head = f"  {name:{column - 2}}"
                lines += textwrap.wrap(
                    summary, width, initial_indent=head, subsequent_indent=" " * column
                )
        return "\n".join([*lines, "", self.epilog or ""])


def build_parser(*chosen: str) -> argparse.ArgumentParser:
    """Build the parser.

    Args:
        chosen: The commands whose arguments are needed, most often the one that will run. Only
            their modules are imported, so that help is fast.
    """
    parser = _Parser(
        prog="d9m",
        description="Deterministic training with PyTorch Lightning: prove it, compare it, fix it.",
        epilog=_EXAMPLES,
    )
    parser.add_argument("--version", action="version", version=f"d9m {__version__}")
    commands = parser.add_subparsers(
        dest="command", metavar="COMMAND", required=True, parser_class=_CommandParser
    )
    for name, summary in COMMANDS.items():
        command = commands.add_parser(
            name, help=summary, description=f"{summary[:1].upper()}{summary[1:]}."
        )
        if name in chosen:
            declare_command(command, _import(name))
    return parser


def _import(command: str) -> ModuleType:
    folder = "machine." if command in _GROUPS[_MACHINE] else ""
    return import_module(f"lightning_d9m.tools.cli.{folder}{command.replace('-', '_')}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``d9m`` on ``argv`` (by default ``sys.argv[1:]``) and return its exit status."""
    argv = sys.argv[1:] if argv is None else argv
    chosen = next((word for word in argv if not word.startswith("-")), None)
    if not argv:
        print(build_parser().format_help(), end="")
        return _ERROR
    if chosen is not None and chosen not in COMMANDS:
        alike = get_close_matches(chosen, COMMANDS, n=1)
        hint = "".join(f"Did you mean `d9m {name}`? " for name in alike)
        print_error(f"{chosen!r} is not a command. {hint}Commands: {', '.join(COMMANDS)}.")
        return _ERROR
    # argparse would take the first word of a training for an argument that may be left out.
    trains = chosen and _TRAINING in _import(chosen).ARGUMENTS
    end = argv.index("--") if trains and "--" in argv else len(argv)
    parser = build_parser(*[chosen] if chosen else [])
    arguments, unknown = parser.parse_known_args(argv[:end])
    if training := argv[end + 1 :]:
        unknown += getattr(arguments, "argv", training)
        arguments.argv = training
    if unknown:  # prints the usage of the command; argparse would print that of d9m
        # argparse has no public list of the options.
        options = re.findall(r"--[\w-]+", arguments.parser.format_help())
        typed = (word.partition("=")[0] for word in unknown)
        alike = [name for word in typed for name in get_close_matches(word, options, n=1)]
        hint = "".join(f". Did you mean {name}?" for name in alike)
        arguments.parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    return _run(arguments)


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise ``SystemExit`` in the body, so that it keeps what it has done.

    By default they end the process at once: a check would leave no result.
    """

    def end(number: int, _: object) -> NoReturn:
        raise SystemExit(128 + number)

    numbers = [
        own for own in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(own) == signal.SIG_DFL
    ]
    if threading.current_thread() is not threading.main_thread():  # the only one that may set them
        numbers = []
    for number in numbers:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


def _run(arguments: argparse.Namespace) -> int:
    """Run the chosen command, print any error as one message, and return the exit status."""
    try:
        with _ended_by_signals():
            status = int(arguments.run(arguments))
        # Flush here, where a closed pipe can be handled, and not when the interpreter exits.
        sys.stdout.flush()
    except D9mError as error:
        print_error(str(error))
        return _FAILED if isinstance(error, CommandError) else _ERROR
    except KeyboardInterrupt:
        print("d9m: interrupted.", file=sys.stderr)
        return 130  # 128 and the number of the signal, as a shell reports it
    except BrokenPipeError:
        # The reader of the pipe has exited (`d9m compare ... | head`).
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as error:
        # Not 1, which means that runs differ. `python -X dev -m lightning_d9m` shows a traceback.
        if sys.flags.dev_mode:
            raise
        text = " ".join(str(error).split())
        advice = (
            "This is a bug in d9m: please report it, with the output of `python -X dev -m "
            "lightning_d9m ...`."
        )
        is_file = isinstance(error, OSError)
        print_error(
            f"{text}. Check the disk and the permissions."
            if is_file
            else f"{type(error).__name__}: {text}. {advice}"
        )
        try:
            sys.stdout.flush()
        except OSError:  # a full disk: exiting must not try again
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _ERROR
    return status
