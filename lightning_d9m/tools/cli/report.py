"""``d9m report``: write the comparison of runs as one HTML file that needs no network."""

import argparse
from dataclasses import replace
from pathlib import Path

from lightning_d9m.engine.ledger.folder import Ledger, read_ledger
from lightning_d9m.errors import LedgerError, file_errors, written_whole
from lightning_d9m.text import printable
from lightning_d9m.tools.cli.arguments import LEDGERS, STATUS, choose_ledgers
from lightning_d9m.tools.comparison.ledgers import compare_ledgers
from lightning_d9m.tools.history.bundle import find_located, list_located, read_located
from lightning_d9m.tools.launch.progress import show_progress
from lightning_d9m.tools.launch.runs import read_runs
from lightning_d9m.tools.output.html_page import (
    GENERATOR_TAG,
    ComparedRuns,
    LoggedDifferences,
    render_page,
)
from lightning_d9m.tools.output.repeat_text import RepeatReport
from lightning_d9m.tools.output.terminal import print_lines

_ALL_RUNS = "the folder of a `d9m repeat`, all of whose runs are compared, or a folder"
ARGUMENTS = f"""{LEDGERS.replace("a folder, whose", f"{_ALL_RUNS}, whose")}
-o, --output OUTPUT  file to write (default: report.html); replaces an earlier report
--force  replace the file even if it is not a report
"""
EXAMPLE = "d9m report d9m-runs/000 -o report.html"
SETTINGS = {"output": {"default": Path("report.html")}}


def run(arguments: argparse.Namespace) -> int:
    """Compare ledgers, write the page, and return the status of the verdict."""
    check_output(arguments.output, force=arguments.force)
    found = compare_chosen(arguments)
    page = render_page(found)
    what = f"The report {arguments.output} cannot be written"
    with file_errors(LedgerError, what), written_whole(arguments.output) as part:
        part.write_text(page, encoding="utf-8")
    lines = [f"{found.verdict}: the report is {printable(str(arguments.output))}"]
    print_lines([*lines, *list_located(found.ledgers)])
    return STATUS[found.verdict]


def compare_chosen(arguments: argparse.Namespace) -> ComparedRuns:
    """Compare the ledgers that were named, the runs of a `d9m repeat`, or the last two ledgers."""
    folder = arguments.expected or Path()
    located = find_located(folder, parents=0)[1] if arguments.actual is None else []
    if located:  # its runs have different probes, and these two show the cause
        return compare_pair(*map(read_ledger, located))
    runs = read_runs(folder) if arguments.actual is None else {}
    if not runs:
        return compare_pair(*map(read_ledger, choose_ledgers(arguments)))
    report = RepeatReport(runs, folder, ())
    if (shown := report.shown) is None:
        raise LedgerError(
            f"{folder} holds run 1 of a `d9m repeat` and no run to compare it with. Name a folder "
            "with two runs, such as d9m-runs/000, or two ledgers."
        )
    # Compared again, with the logged values: keeping those of all runs would take their memory.
    return replace(compare_pair(runs[1].fits[shown.name], shown.ledger), report=report)


def compare_pair(expected: Ledger, actual: Ledger) -> ComparedRuns:
    """Compare two ledgers, and keep the values that they have logged."""
    values = LoggedDifferences()
    ledgers = expected, actual
    with show_progress("records compared") as progress:
        comparison = compare_ledgers(*ledgers, progress=progress, watch=values.watch)
    return ComparedRuns(comparison, values, ledgers, located=read_located(ledgers)[1])


def check_output(path: Path, *, force: bool) -> None:
    """Raise before the work if the file cannot be written or is not a report."""
    if path.is_dir() or not path.parent.is_dir():
        what = "is a folder" if path.is_dir() else "is in a folder that does not exist"
        raise LedgerError(f"The report {path} {what}; name a file in a folder that exists (-o).")
    if force or not path.exists():
        return
    with file_errors(LedgerError, f"{path} cannot be read"), path.open("rb") as file:
        ours = GENERATOR_TAG.encode() in file.read(1024)
    if not ours:
        raise LedgerError(
            f"{path} exists and is not a report of lightning_d9m, so it was left unchanged. Name "
            "another file with -o, or replace it with --force."
        )
