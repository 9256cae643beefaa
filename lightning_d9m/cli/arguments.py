"""What the commands have in common that run a training of the user's."""

import argparse


def add_command_arguments(parser: argparse.ArgumentParser, what: str) -> None:
    """Declare the training's command, how long a run may take, and the form of the output.

    Args:
        parser: The parser of a command of ``d9m``.
        what: What the training has to be, for its help.
    """
    parser.add_argument(
        "--timeout", type=float, metavar="SECONDS", help="end a run that takes longer, as hanging"
    )
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")
    parser.add_argument(
        "words",
        nargs=argparse.REMAINDER,
        metavar="-- COMMAND",
        help=f"{what}, such as: python train.py",
    )


def command_of(arguments: argparse.Namespace) -> list[str]:
    """Return the training's command; empty where none was given."""
    words: list[str] = arguments.words
    return words[1:] if words[:1] == ["--"] else words
