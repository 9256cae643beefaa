"""``d9m repeat``: run a command several times and compare the runs bit for bit."""

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
from lightning_d9m.launch.fit_pairs import pair_fits
from lightning_d9m.launch.output_folder import make_output
from lightning_d9m.launch.run import Run, make_run_folder, read_fits, run_once
from lightning_d9m.output.repeat_text import RepeatReport

_MIN_RUNS = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``d9m repeat``."""
    parser.usage = (
        "d9m repeat [-n RUNS | --interrupt [--allow-objects]] [-o DIR]\n"
        "                  [--timeout SECONDS] [--json] -- COMMAND ..."
    )
    parser.add_argument(
        "-n",
        "--runs",
        type=whole_number(_MIN_RUNS, MOST_RUNS),
        help="number of runs (default: 2)",
    )
    parser.add_argument(
        "--interrupt",
        action="store_true",
        help="kill runs at several points, resume them, and compare them with a straight run",
    )
    parser.add_argument(
        "--allow-objects",
        action="store_true",
        help="with --interrupt: resume also from checkpoints that hold Python objects, as "
        "fit(..., weights_only=False) does",
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
    """Run the command and print the comparison.

    Returns:
        0 if all runs are equal, 1 if some differ, 2 if none differs but some failed.
    """
    argv = get_command(arguments, "repeat")
    _check(arguments)
    output = make_output(arguments.output)
    if arguments.interrupt:
        report = interrupt_and_resume(
            argv, output, timeout=arguments.timeout, allow_objects=arguments.allow_objects
        )
    else:
        report = RepeatReport(_repeat(argv, output, arguments), output)
    report.print_out(as_one_object=arguments.json)
    return {"equal": 0, "different": 1, "incomplete": 2}[report.verdict]


def _repeat(argv: list[str], output: Path, arguments: argparse.Namespace) -> dict[int, Run]:
    runs: dict[int, Run] = {}
    count = arguments.runs or _MIN_RUNS
    for number in range(1, count + 1):
        title = f"run {number} of {count}"
        folder = make_run_folder(output, f"run-{number:03d}")
        try:
            run_once(argv, folder, title=title, timeout=arguments.timeout)
            fits = read_fits(folder, argv)
            runs[number] = Run(pair_fits(runs[1].fits, fits) if runs else fits)
        except CommandError as error:
            before = f" (run {number - 1} succeeded)" if runs else ""
            raise CommandError(f"In {title}{before}: {error}") from error
    return runs


def _check(arguments: argparse.Namespace) -> None:
    if arguments.interrupt and arguments.runs is not None:
        raise SettingError(
            f"--runs is {arguments.runs}, but --interrupt makes one run for each point that it "
            "chooses. Leave one of them out."
        )
    if arguments.allow_objects and not arguments.interrupt:
        raise SettingError(
            "--allow-objects is only for --interrupt, which loads checkpoints. Leave it out, or "
            "add --interrupt."
        )
