"""``d9m compare``: compare two ledgers and name the first divergence."""

import argparse
import shlex
from collections.abc import Iterator
from pathlib import Path

from lightning_d9m.cli.arguments import FORMAT, LEDGERS, choose_ledgers
from lightning_d9m.comparison.ledgers import compare_ledgers
from lightning_d9m.comparison.noise import judge_change
from lightning_d9m.errors import LedgerError, SettingError, file_errors
from lightning_d9m.launch.progress import show_progress
from lightning_d9m.ledger.folder import Ledger, read_ledger, search_ledgers
from lightning_d9m.output.columns import print_result
from lightning_d9m.output.comparison_text import format_evidence, state_verdict
from lightning_d9m.output.noise_text import draw_noise, format_noise, list_noise_facts, state_noise
from lightning_d9m.output.terminal import find_command, format_next_steps, list_next_steps
from lightning_d9m.text import printable

ARGUMENTS = f"""{LEDGERS}{FORMAT}
-v, --verbose  show whole digests and the bits of numbers
--noise DIR ...  compare the difference of the two trainings with that of runs without the change: a
    folder with at least three, as d9m repeat or d9m audit model leaves it; may be given several
    times. Exit status 0: noise explains the difference
--value NAME  with --noise: the logged value that decides (default: all)
--plot FILE  with --noise: write change and noise by epoch as an SVG
"""


def run(arguments: argparse.Namespace) -> int:
    """Compare two ledgers, print the result, and return 0 if they are equal, else 1."""
    paths = choose_ledgers(arguments)
    expected, actual = map(read_ledger, paths)
    if arguments.noise:
        return _compare_with_noise(arguments, expected, actual)
    if arguments.value or arguments.plot:
        raise SettingError(
            "--value and --plot are only for --noise, the runs that show what noise does. Add "
            "--noise DIR, or leave them out."
        )
    with show_progress("records compared") as progress:
        comparison = compare_ledgers(expected, actual, progress=progress)
    evidence = format_evidence(comparison, verbose=arguments.verbose)
    if arguments.format == "text" and comparison.verdict == "different":
        command = f"-- {printable(find_command((expected, actual)) or 'COMMAND')}"
        ledgers = printable(" ".join(shlex.quote(str(path)) for path in paths))
        evidence += format_next_steps(list_next_steps(command, ledgers))
    print_result(arguments.format, comparison.as_json(), evidence, state_verdict(comparison))
    return 0 if comparison.equal else 1


def _compare_with_noise(arguments: argparse.Namespace, expected: Ledger, actual: Ledger) -> int:
    """Print whether noise explains the difference; return 0 if it does, else 1."""
    noise = [ledger for folder in arguments.noise for ledger in _list_noise(folder, expected)]
    with show_progress("runs read") as progress:
        found = judge_change(expected, actual, noise, arguments.value, progress)
    if arguments.plot is not None:
        with file_errors(LedgerError, f"The plot {arguments.plot} cannot be written"):
            arguments.plot.write_text(draw_noise(found), encoding="utf-8")
    print_result(arguments.format, list_noise_facts(found), format_noise(found), state_noise(found))
    return 0 if found.verdict == "within noise" else 1


def _list_noise(folder: Path, expected: Ledger) -> Iterator[Ledger]:
    """Yield the ledgers of a folder that belong to the same fit of a program.

    Of a `d9m audit model`, these are the runs without determinism.
    """
    for place in sorted(folder.glob("without-[0-9]*")) or [folder]:
        for entry in search_ledgers(place):
            ledger = entry.ledger if entry.kind == "fit" else None
            if ledger is not None and ledger.header.fit == expected.header.fit:
                yield ledger
