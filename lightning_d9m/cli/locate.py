"""``d9m locate``: run a command again and again, and close in on where its runs diverge.

Whole run, then the steps of the epoch that differs, then the modules of the step, then the
operations of the module: each look is a pair of runs, steered by variables, so that nothing is
edited and a whole run is cheap. A divergence that does not come back in a narrower look is
reported as far as it was seen.
"""

import argparse
import json
import os
import sys
from pathlib import Path

from lightning_d9m.cli.arguments import add_command_arguments, command_of
from lightning_d9m.errors import SettingError
from lightning_d9m.launch.output_folder import make_output
from lightning_d9m.launch.run_pair import Runner
from lightning_d9m.locate.search import Search
from lightning_d9m.output.locate_text import describe


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the words of ``d9m locate``."""
    parser.usage = (
        "d9m locate [--without-recipe] [--tries N] [-o DIR] [--timeout SECONDS] [--json]\n"
        "                  -- COMMAND ..."
    )
    parser.add_argument(
        "--without-recipe",
        action="store_true",
        help="seed and record, but switch no algorithm: what would differ without lightning_d9m",
    )
    parser.add_argument(
        "--tries", type=int, default=2, help="pairs of runs for each look (default: 2)"
    )
    parser.add_argument(
        "-o", "--output", type=Path, metavar="DIR", help="new folder for ledgers, logs and dumps"
    )
    add_command_arguments(parser, "a training with Lightning")


def run(arguments: argparse.Namespace) -> int:
    """Locate; return 0 when no runs differ, 1 when something was found."""
    words = command_of(arguments)
    _check(arguments, words)
    steering = _without_recipe() if arguments.without_recipe else {}
    output = make_output(arguments.output)
    runner = Runner(words, output, arguments.timeout, steering, _tell)
    found = Search(runner, arguments.tries).locate()
    if arguments.json:
        print(json.dumps(found.as_json() | {"output": str(output)}, indent=2))
    else:
        print("\n".join(describe(found, recipe=not arguments.without_recipe)))
        print(f"ledgers: {output}")
    return 1 if found.cause is not None else 0


def _without_recipe() -> dict[str, str]:
    steering = {"LIGHTNING_D9M_CONTROL": "off"}
    if "PYTHONHASHSEED" not in os.environ:
        steering["PYTHONHASHSEED"] = "random"  # as the program has it: it is fixed otherwise
    return steering


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _check(arguments: argparse.Namespace, words: list[str]) -> None:
    if not words:
        raise SettingError(
            "There is no command to run. Give it after `--`: d9m locate -- python train.py"
        )
    if arguments.tries < 1:
        raise SettingError(f"--tries is {arguments.tries}; allowed: a whole number from 1.")
    if arguments.timeout is not None and not arguments.timeout > 0:
        raise SettingError(f"--timeout is {arguments.timeout:g}; allowed: more than 0 seconds.")
