"""Arguments that several commands share, and the checks of their values."""

import argparse
from collections.abc import Callable
from pathlib import Path

from lightning_d9m.errors import SettingError
from lightning_d9m.ledger.folder import find_last_pair

# Most runs of one command: their folders are numbered with three digits.
MOST_RUNS = 1000


def whole_number(minimum: int, maximum: int | None = None) -> Callable[[str], int]:
    """Return an argparse ``type`` that accepts whole numbers within bounds, both inclusive.

    >>> whole_number(2, 9)("3")
    3
    """
    allowed = f"a whole number from {minimum}" + (f" to {maximum}" if maximum is not None else "")

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = None
        if value is None or value < minimum or (maximum is not None and value > maximum):
            raise argparse.ArgumentTypeError(f"{text} is not valid; allowed: {allowed}.")
        return value

    return parse


def positive_seconds(text: str) -> float:
    """Parse a duration; an argparse ``type``.

    >>> positive_seconds("1.5")
    1.5
    """
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value > 0:  # NaN included
        raise argparse.ArgumentTypeError(f"{text} is not valid; allowed: more than 0 seconds.")
    return value


def add_format_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the format of the output; ``arguments.format`` is one of the three."""
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "--format",
        choices=("text", "json", "markdown"),
        default="text",
        help="text for a terminal, one JSON object, or Markdown, for example for the summary of a "
        "CI job (default: text)",
    )
    form.add_argument(
        "--json",
        action="store_const",
        dest="format",
        const="json",
        default=argparse.SUPPRESS,
        help="short for --format json",
    )


def add_command_arguments(
    parser: argparse.ArgumentParser, what: str, *, with_json: bool = True
) -> None:
    """Declare the training's command, its timeout, and the form of the output."""
    parser.add_argument(
        "--timeout",
        type=positive_seconds,
        metavar="SECONDS",
        help="stop a run that takes longer and treat it as hanging",
    )
    if with_json:
        parser.add_argument(
            "--json", action="store_true", help="print the result as one JSON object"
        )
    parser.add_argument(
        "argv",
        nargs=argparse.REMAINDER,
        metavar="-- COMMAND",
        help=f"{what}, such as: python train.py",
    )


def add_ledger_arguments(parser: argparse.ArgumentParser, *, repeat: bool = False) -> None:
    """Declare the two ledgers that a command compares; ``choose_ledgers`` reads them."""
    forms = "a folder fit-NNN, a folder that holds exactly one, or one file rank-N.jsonl"
    all_runs = "the folder of a `d9m repeat`, all of whose runs are compared, or " if repeat else ""
    parser.add_argument(
        "expected",
        metavar="REFERENCE",
        type=Path,
        nargs="?",
        help=f"ledger of the earlier run: {forms}. Alone: {all_runs}a folder, whose last two "
        "ledgers are compared (default: the working folder)",
    )
    parser.add_argument(
        "actual",
        metavar="THIS_RUN",
        type=Path,
        nargs="?",
        help="ledger of the later run, in the same forms",
    )


def choose_ledgers(arguments: argparse.Namespace) -> tuple[Path, Path]:
    """Return the two ledgers: those that were named, or the last two under a folder.

    Raises:
        LedgerError: If fewer than two were named, and the folder holds fewer than two.
    """
    if arguments.actual is not None:
        return arguments.expected, arguments.actual
    return find_last_pair(arguments.expected or Path())


def get_command(arguments: argparse.Namespace, name: str) -> list[str]:
    """Return the training's command, without the leading ``--``.

    Raises:
        SettingError: If no command was given.
    """
    argv: list[str] = arguments.argv
    command = argv[1:] if argv[:1] == ["--"] else argv
    if not command:
        raise SettingError(
            f"There is no command to run. Give it after `--`: d9m {name} -- python train.py"
        )
    return command
