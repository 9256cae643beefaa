"""``d9m repeat``: run a command several times and say whether the runs agree bit for bit."""

import argparse
from pathlib import Path

from lightning_d9m.cli.arguments import (
    MOST_RUNS,
    add_command_arguments,
    get_command,
    whole_number,
)
from lightning_d9m.cli.repeat_interrupted import interrupt_and_resume
from lightning_d9m.errors import CommandError, SettingError
from lightning_d9m.launch.output_folder import make_output
from lightning_d9m.launch.run import Run, make_run_folder, read_fits, run_once
from lightning_d9m.output.repeat_text import RepeatReport

_FEWEST_RUNS = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the words of ``d9m repeat``."""
    parser.usage = (
        "d9m repeat [-n RUNS | --interrupt] [-o DIR] [--timeout SECONDS] [--json]\n"
        "                  -- COMMAND ..."
    )
    parser.add_argument(
        "-n",
        "--runs",
        type=whole_number(_FEWEST_RUNS, MOST_RUNS),
        help="number of runs (default: 2)",
    )
    parser.add_argument(
        "--interrupt",
        action="store_true",
        help="hold runs that are killed at several places and resumed against a straight one",
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="DIR",
        help="new folder for ledgers and logs (default: the next free d9m-runs/NNN)",
    )
    add_command_arguments(parser, "a training with Lightning")


def run(arguments: argparse.Namespace) -> int:
    """Run the command; return 0 when all runs agree, 1 when they differ."""
    words = get_command(arguments, "repeat")
    _check(arguments)
    output = make_output(arguments.output)
    if arguments.interrupt:
        runs = interrupt_and_resume(words, output, timeout=arguments.timeout)
    else:
        runs = _repeat(words, output, arguments)
    report = RepeatReport(runs, output)
    report.print_out(as_one_object=arguments.json)
    return 0 if report.equal else 1


def _repeat(words: list[str], output: Path, arguments: argparse.Namespace) -> list[Run]:
    runs: list[Run] = []
    many = arguments.runs or _FEWEST_RUNS
    for number in range(1, many + 1):
        title = f"run {number} of {many}"
        folder = make_run_folder(output, f"run-{number:03d}")
        try:
            run_once(words, folder, title=title, timeout=arguments.timeout)
            runs.append(Run(read_fits(folder, words)))
        except CommandError as error:
            before = f" (run {number - 1} ended well)" if runs else ""
            raise CommandError(f"In {title}{before}: {error}") from error
    return runs


def _check(arguments: argparse.Namespace) -> None:
    if arguments.interrupt and arguments.runs is not None:
        raise SettingError(
            f"--runs is {arguments.runs} beside --interrupt, which makes one run for each place "
            "that it chooses. Leave one of them out."
        )
