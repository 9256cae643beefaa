"""The description of a command's arguments, and arguments that several commands share.

The module of a command has ``ARGUMENTS``, the text of its arguments, and ``EXAMPLE``, a call that
works. It may have ``SETTINGS``, what the text cannot say, by the name of an argument.
"""

import argparse
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from lightning_d9m.errors import SettingError

# The exit status of a command whose result has a verdict. A script that takes 1 for a difference
# must not take a run that was cut off for one.
STATUS = {"equal": 0, "different": 1, "not comparable": 1, "incomplete": 3}
# Most runs of one command: their folders are numbered with three digits.
MOST_RUNS = 1000


def whole_number(minimum: int, maximum: int | None = None) -> Callable[[str], int]:
    """Return an argparse ``type`` that accepts whole numbers within bounds, both inclusive.

    >>> whole_number(2, 9)("3")
    3
    """
    allowed = f"a whole number from {minimum}" + (f" to {maximum}" if maximum is not None else "")

    def parse(text: str) -> int:
        with suppress(ValueError):
            value = int(text)
            if minimum <= value and (maximum is None or value <= maximum):
                return value
        # Of a `ValueError`, argparse would show the name of this function and not the text.
        raise argparse.ArgumentTypeError(f"{text} is not valid; allowed: {allowed}.")

    return parse


def positive_seconds(text: str) -> float:
    """Parse a duration; an argparse ``type``.

    >>> positive_seconds("1.5")
    1.5
    """
    with suppress(ValueError):
        if (value := float(text)) > 0:  # not NaN
            return value
    raise argparse.ArgumentTypeError(f"{text} is not valid; allowed: more than 0 seconds.")


def signing_words(text: str) -> list[str]:
    """Parse words of ``model_signing``, quoted as in a shell; an argparse ``type``."""
    with suppress(ValueError):  # a quote is open
        if words := shlex.split(text):
            return words
    raise argparse.ArgumentTypeError(f"{text!r} is not valid; close each quote.")


_PATH = re.compile("CHECKPOINT|DIR|OUTPUT|FILE|FOLDER|LEDGER|PATH|REFERENCE|THIS_RUN")
# The text is what a user reads in `--help`; the calls of argparse follow from it, so that the two
# cannot differ.
_FORM = re.compile(
    r"(?P<names>(?:-\S+ ?)*)(?:(?P<dest>\w+):)?(?P<value>\S*?)(?P<nargs>[?*+]?)"
    r"(?P<again> \.\.\.)?"
)
_TYPES: Mapping[str, Callable[[str], Any]] = {
    "EPOCH": whole_number(0),
    "METHOD": signing_words,
    "N": whole_number(1),
    "SECONDS": positive_seconds,
}
FORMAT = """
--format {text,json,markdown}  text for a terminal, one JSON object, or Markdown, for example for
    the summary of a CI job (default: text)
| --json  short for --format json
"""
LEDGERS = """
expected:REFERENCE?  ledger of the earlier run: a folder fit-NNN, a folder that holds exactly one,
    or one file rank-N.jsonl. Alone: a folder, whose last two ledgers are compared (default:
    the working folder)
actual:THIS_RUN?  ledger of the later run, in the same forms
"""
SIGNER = """
--signer METHOD  how model_signing verifies the signature (exit status 2 if it is not valid), in its
    words, such as "key --public_key FILE", or "sigstore --identity TEXT --identity_provider URL"
"""
OUTPUT = """
-o, --output DIR  new folder for ledgers and logs (default: the next free d9m-runs/NNN)
"""
TIMEOUT = """
--timeout SECONDS  stop a run that takes longer and treat it as hanging
"""
# The command that a run starts comes last: it has words of any kind.
TRAINING = """
-- COMMAND  a training, such as: python train.py
"""
COMMAND = f"""{TIMEOUT}
--json  print the result as one JSON object
{TRAINING}"""


def declare_command(parser: argparse.ArgumentParser, command: ModuleType) -> None:
    """Declare the arguments that a text of a module describes: a form, two blanks, and the help.

    The forms are ``-o, --output DIR`` for an option with a value, ``--json`` for a flag,
    ``name:PATH`` for a positional argument, and ``-- COMMAND`` for all words behind ``--``. Behind
    the value, ``?`` stands for at most one, ``*`` and ``+`` for several, and ``...`` for an option
    that may be given again; ``{a,b}`` is a choice. The name of a value decides its type. An
    argument after ``| `` excludes the one before. Further lines of an argument are indented.
    """
    blocks = re.split(r"\n+(?=\S)", command.ARGUMENTS.strip("\n"))
    group: Any = parser
    has_words = False
    parser.set_defaults(run=command.run, parser=parser, format="text")
    parser.epilog = f"example: {command.EXAMPLE}"
    short = {"action": "store_const", "dest": "format", "default": argparse.SUPPRESS}
    formats = {name: {**short, "const": name} for name in ("json", "markdown")}
    settings = {**formats, **getattr(command, "SETTINGS", {})}
    for number, block in enumerate(blocks):
        form, _, described = block.removeprefix("| ").partition("  ")
        if not block.startswith("| "):
            excluded = blocks[number + 1 : number + 2]
            alone = not any(other.startswith("| ") for other in excluded)
            group = parser if alone else parser.add_mutually_exclusive_group()
        if form == "-- COMMAND":
            # After other words, the rest would include the options that follow these.
            rest = "*" if has_words else argparse.REMAINDER
            parser.add_argument("argv", nargs=rest, metavar=form, help=described)
            usage = parser.format_usage().removeprefix("usage: ").rstrip()
            usage = usage.replace(f"[{form} ...]", "...")
            parser.usage = f" {form} ...".join(usage.rsplit(" ...", 1))  # others may repeat, too
            continue
        found = _FORM.fullmatch(form)
        assert found is not None, form
        names = found["names"].replace(",", "").split() or [found["dest"]]
        given = _read_value(found) | {"help": " ".join(described.split())}
        given |= settings.get(names[-1].lstrip("-").replace("-", "_"), {})
        group.add_argument(*names, **given)
        has_words |= not found["names"]


def _read_value(found: re.Match[str]) -> dict[str, Any]:
    """Return what argparse needs to know of the values of an argument."""
    if not (value := found["value"]):
        return {"action": "store_true"}
    given: dict[str, Any] = {"type": Path if _PATH.fullmatch(value) else _TYPES.get(value)}
    if value.startswith("{"):
        given["choices"] = value.strip("{}").split(",")
    else:
        given |= {"nargs": found["nargs"] or None, "metavar": value}
    return given | ({"action": "append"} if found["again"] else {})


def choose_ledgers(arguments: argparse.Namespace) -> tuple[Path, Path]:
    """Return the two ledgers: those that were named, or the last two under a folder.

    Raises:
        LedgerError: If fewer than two were named, and the folder holds fewer than two.
    """
    from lightning_d9m.tools.comparison.found_ledgers import find_last_pair  # not for `d9m --help`

    if arguments.actual is not None:
        return arguments.expected, arguments.actual
    return find_last_pair(arguments.expected or Path())


def refuse_options(arguments: argparse.Namespace, names: Sequence[str], reason: str) -> None:
    """Raise a ``SettingError`` if an option of these names is given, with the reason."""
    for name in names:
        if (value := getattr(arguments, name)) is not None and value is not False:
            raise SettingError(f"--{name.replace('_', '-')} has no effect here: {reason}.")


def check_new_file(path: Path) -> None:
    """Raise a ``SettingError`` if a file exists, or is in no folder."""
    if path.exists() or not path.absolute().parent.is_dir():
        raise SettingError(
            f"{path} {'exists already' if path.exists() else 'is in no folder'}, so nothing can be "
            "written to it. Give another file."
        )


def get_command(arguments: argparse.Namespace) -> list[str]:
    """Return the training's command.

    Raises:
        SettingError: If no command was given.
    """
    argv: list[str] = arguments.argv
    if not argv:
        example = arguments.parser.epilog.removeprefix("example: ")
        raise SettingError(f"There is no command to run. Give it after `--`: {example}")
    return argv
