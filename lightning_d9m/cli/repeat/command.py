"""``d9m repeat``: run a command several times and compare the runs bit for bit."""

import argparse
import os
import re
import time
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path

from lightning_d9m.cli.arguments import (
    MOST_RUNS,
    add_command_arguments,
    add_format_arguments,
    get_command,
    whole_number,
)
from lightning_d9m.cli.repeat.interrupted import interrupt_and_resume
from lightning_d9m.cli.repeat.processes import (
    RANKS_VARIABLE,
    PlannedRun,
    plan_runs,
    process_counts,
)
from lightning_d9m.errors import CommandError, SettingError
from lightning_d9m.launch.fit_pairs import pair_fits
from lightning_d9m.launch.interruption_points import LAST_BITS
from lightning_d9m.launch.left_files import FileWatch
from lightning_d9m.launch.run import Run, make_output, make_run_folder, read_fits, run_once
from lightning_d9m.ledger.stack import LAST_BITS_SETTING
from lightning_d9m.output.repeat_text import RepeatReport

_MIN_RUNS = 2
# What changes the bits of a training on one machine, unless they are portable.
_PORTABLE = {"LIGHTNING_D9M_PORTABLE": "1", "OMP_NUM_THREADS": "1"}
_STACKS = (
    ("one thread", _PORTABLE),
    ("two threads", _PORTABLE | {"OMP_NUM_THREADS": "2"}),
    ("no vector instructions", _PORTABLE | {"ATEN_CPU_CAPABILITY": "default"}),
)
_MOST_PRINTED, _MOST_SHOWN = 2**20, 60
_VARIES = re.compile(
    r"\d+:\d\d|0x[0-9a-f]+|\d\s?(?:[munµ]?s|seconds?|minutes?|[KMG]i?B)\b|it/s|s/it|%|\b[Pp][Ii][Dd]\b"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``d9m repeat``."""
    parser.usage = (
        "d9m repeat [-n RUNS | --portable | --processes P,P,... |\n"
        "                   --interrupt [--allow-objects]]\n"
        "                  [--last-bits] [-o DIR] [--timeout SECONDS]\n"
        "                  [--format FORMAT | --json] [-v] -- COMMAND ..."
    )
    parser.add_argument(
        "-n",
        "--runs",
        type=whole_number(_MIN_RUNS, MOST_RUNS),
        help="number of runs (default: 2)",
    )
    parser.add_argument(
        "--portable",
        action="store_true",
        help="compute portable bits, and run with one thread, with two, and without vector "
        "instructions",
    )
    parser.add_argument(
        "--processes",
        type=process_counts,
        metavar="P,P,...",
        help="numbers of processes, such as 1,2,4: run once on each, started as torchrun starts "
        "them; a command that contains {processes} starts them itself",
    )
    parser.add_argument(
        "--interrupt",
        action="store_true",
        help="kill runs at several points, resume them, and compare them with a straight run",
    )
    parser.add_argument(
        "--last-bits",
        action="store_true",
        help="change the last bit of each weight at the beginning of all runs but the first, to "
        "see what noise does; the runs then differ. For d9m compare --noise",
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
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="show whole digests and the bits of losses"
    )
    add_format_arguments(parser)
    add_command_arguments(parser, "a training", with_json=False)


def run(arguments: argparse.Namespace) -> int:
    """Run the command and print the comparison.

    Returns:
        0 if all runs are equal, 1 if some differ, 2 if none differs but some failed.
    """
    argv = get_command(arguments, "repeat")
    _check_arguments(arguments)
    output = make_output(arguments.output)
    if arguments.interrupt:
        report = interrupt_and_resume(
            argv, output, timeout=arguments.timeout, allow_objects=arguments.allow_objects
        )
    else:
        count = arguments.runs or _MIN_RUNS
        if arguments.portable:
            plans = [PlannedRun(argv, title, variables=given) for title, given in _STACKS]
        elif arguments.processes is None:
            plans = [
                PlannedRun(
                    argv,
                    f"run {number + 1} of {count}",
                    variables={LAST_BITS: str(number)} if arguments.last_bits and number else {},
                )
                for number in range(count)
            ]
        else:
            plans = plan_runs(argv, arguments.processes)
        watch = FileWatch(argv, output)
        runs = _repeat(plans, output, arguments.timeout, watch)
        if arguments.last_bits:
            _check_last_bits(runs)
        printed = "" if arguments.processes else _compare_printed(output)
        report = RepeatReport(runs, output, argv, printed=printed, left=watch.describe)
    if arguments.format == "markdown":
        print(report.as_markdown())
    else:
        report.print_out(as_one_object=arguments.format == "json", verbose=arguments.verbose)
    return {"equal": 0, "different": 1, "incomplete": 2}[report.verdict]


def _repeat(
    plans: Sequence[PlannedRun], output: Path, timeout: float | None, watch: FileWatch
) -> dict[int, Run]:
    runs: dict[int, Run] = {}
    for number, plan in enumerate(plans, start=1):
        folder = make_run_folder(output, f"run-{number:03d}")
        start = time.monotonic()
        try:
            run_once(
                plan.command,
                folder,
                title=plan.title,
                timeout=timeout,
                variables=plan.variables,
                processes=plan.started,
                expected_seconds=runs[number - 1].seconds if runs else None,
            )
            seconds = time.monotonic() - start
            watch.note_run()
            fits = read_fits(folder, plan.command)
            fits = pair_fits(runs[1].fits, fits) if runs else fits
            runs[number] = Run(fits, processes=plan.processes, seconds=seconds)
        except CommandError as error:
            before = f" (run {number - 1} succeeded)" if runs else ""
            raise CommandError(f"In {plan.title}{before}: {error}") from error
    return runs


def _check_last_bits(runs: Mapping[int, Run]) -> None:
    """Raise if a run did not change the last bits of weights."""
    for number, run in runs.items():
        for name, ledger in run.fits.items():
            is_changed_fit = number > 1 and name.startswith("fit-")
            if is_changed_fit and LAST_BITS_SETTING not in ledger.header.settings:
                raise CommandError(
                    f"The training of {ledger.path} left the last bits of its weights alone: "
                    "--last-bits needs a Trainer of Lightning with DeterminismCallback."
                )


def _compare_printed(output: Path) -> str:
    """Return the first line that a run printed otherwise than run 1; empty if there is none."""
    first, *others = (_read_printed(log) for log in sorted(output.glob("run-*/output.log")))
    for lines in others:
        for one, other in zip_longest(first, lines, fillvalue=""):
            if one != other:
                return f"such as {one[:_MOST_SHOWN]!r} and {other[:_MOST_SHOWN]!r}"
    return ""


def _read_printed(log: Path) -> list[str]:
    """Return the lines of a log without those with times, sizes, addresses and progress."""
    with log.open(errors="replace") as file:
        text = file.read(_MOST_PRINTED).replace(log.parent.name, "run")
    return [line for line in text.splitlines() if not _VARIES.search(line)]


def _check_arguments(arguments: argparse.Namespace) -> None:
    if arguments.portable and (arguments.runs or arguments.processes or arguments.interrupt):
        raise SettingError(
            "--portable is given with --runs, --processes or --interrupt. --portable makes one run "
            "for each setting of this machine. Leave one of them out."
        )
    if arguments.last_bits and (arguments.portable or arguments.processes or arguments.interrupt):
        raise SettingError(
            "--last-bits is given with --portable, --processes or --interrupt, whose runs should "
            "be equal. Leave one of them out."
        )
    if arguments.processes is not None:
        _check_processes(arguments)
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


def _check_processes(arguments: argparse.Namespace) -> None:
    given = ",".join(map(str, arguments.processes))
    for name in ("interrupt", "runs"):
        if getattr(arguments, name):
            raise SettingError(
                f"--processes is {given}, and --{name} is given too. --processes makes one run on "
                f"each number of processes. Leave one of them out."
            )
    logical_ranks = os.environ.get(RANKS_VARIABLE, "")
    if logical_ranks.isdigit() and max(arguments.processes) > int(logical_ranks):
        raise SettingError(
            f"--processes is {given}, but {RANKS_VARIABLE} is {logical_ranks}: each process needs "
            f"at least one logical rank. Allowed: numbers from 1 to {logical_ranks}."
        )
