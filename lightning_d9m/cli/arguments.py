"""The description of a command's arguments, and arguments that several commands share."""

import argparse
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

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


_PATHS = (
    "CHECKPOINT",
    "DIR",
    "OUTPUT",
    "FILE",
    "FOLDER",
    "LEDGER",
    "PATH",
    "OLD",
    "NEW",
    "REFERENCE",
    "THIS_RUN",
)
_TYPES: Mapping[str, Callable[[str], Any]] = {
    **dict.fromkeys(_PATHS, Path),
    "EPOCH": whole_number(0),
    "N": whole_number(1),
    "SECONDS": positive_seconds,
}
_FORMAT = """
--format {text,json,markdown}  text for a terminal, one JSON object, or Markdown, for example for
    the summary of a CI job (default: text)
| --json  short for --format json
"""
_LEDGERS = """
expected:REFERENCE?  ledger of the earlier run: a folder fit-NNN, a folder that holds exactly one,
    or one file rank-N.jsonl. Alone: ALL_RUNSa folder, whose last two ledgers are compared (default:
    the working folder)
actual:THIS_RUN?  ledger of the later run, in the same forms
"""
_COMMAND = """
--timeout SECONDS  stop a run that takes longer and treat it as hanging
--json  print the result as one JSON object
"""


def declare(parser: argparse.ArgumentParser, text: str, **settings: Mapping[str, Any]) -> None:
    """Declare the arguments that a text describes: for each a form, two blanks, and the help.

    The forms are ``-o, --output DIR`` for an option with a value, ``--json`` for a flag, and
    ``name:PATH`` for a positional argument. Behind the value, ``?`` stands for at most one, ``*``
    and ``+`` for several, and ``...`` for an option that may be given again; ``{a,b}`` is a choice.
    The name of a value decides its type. An argument after ``| `` excludes the one before.

    Args:
        parser: The parser of a command.
        text: The description; further lines of an argument are indented.
        settings: Further settings of an argument, by its name.
    """
    blocks = re.split(r"\n(?=\S)", text.strip("\n"))
    group: Any = parser
    for number, block in enumerate(blocks):
        form, _, described = block.removeprefix("| ").partition("  ")
        if not block.startswith("| "):
            excluded = blocks[number + 1 : number + 2]
            alone = not any(other.startswith("| ") for other in excluded)
            group = parser if alone else parser.add_mutually_exclusive_group()
        words = form.split()
        names = [word.rstrip(",") for word in words if word.startswith("-")]
        given = _read_form(words[len(names) :], is_option=bool(names))
        name = given.pop("dest", None) or names[-1].lstrip("-")
        given |= {"help": " ".join(described.split()), **settings.get(name.replace("-", "_"), {})}
        group.add_argument(*(names or [name]), **given)


def _read_form(values: list[str], *, is_option: bool) -> dict[str, Any]:
    """Return what argparse needs to know of the values of an argument."""
    if not values:
        return {"action": "store_true"}
    given: dict[str, Any] = {}
    if values[-1] == "...":
        given = {"action": "append"}
        values = values[:-1]
    dest, colon, metavar = values[0].rpartition(":")
    if colon and not is_option:
        given["dest"] = dest
        values[0] = metavar
    if len(values) > 1:
        given |= {"nargs": len(values), "metavar": tuple(values)}
    elif values[0].startswith("{"):
        given["choices"] = values[0].strip("{}").split(",")
    else:
        given["metavar"] = values[0].rstrip("?*+")
        if nargs := values[0][len(given["metavar"]) :]:
            given["nargs"] = nargs
    kind = _TYPES.get(values[0].rstrip("?*+"))
    return given if kind is None else {"type": kind, **given}


def add_format_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the format of the output; ``arguments.format`` is one of the three."""
    json = {"action": "store_const", "dest": "format", "const": "json"}
    declare(
        parser, _FORMAT, format={"default": "text"}, json={**json, "default": argparse.SUPPRESS}
    )


def add_command_arguments(
    parser: argparse.ArgumentParser, what: str, *, with_json: bool = True
) -> None:
    """Declare the training's command, its timeout, and the form of the output."""
    declare(parser, _COMMAND if with_json else _COMMAND.partition("\n--json")[0])
    described = f"{what}, such as: python train.py"
    parser.add_argument("argv", nargs=argparse.REMAINDER, metavar="-- COMMAND", help=described)
    usage = parser.format_usage().removeprefix("usage: ").rstrip()
    parser.usage = parser.usage or usage.replace(" ...", " -- COMMAND ...")


def add_ledger_arguments(parser: argparse.ArgumentParser, *, repeat: bool = False) -> None:
    """Declare the two ledgers that a command compares; ``choose_ledgers`` reads them."""
    all_runs = "the folder of a `d9m repeat`, all of whose runs are compared, or " if repeat else ""
    declare(parser, _LEDGERS.replace("ALL_RUNS", all_runs))


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
