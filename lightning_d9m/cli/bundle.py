"""``d9m bundle``: pack two ledgers and what is known of their difference, and open such a file."""

import argparse
import json
import shlex
from pathlib import Path

import msgspec

from lightning_d9m.cli.arguments import add_format_arguments, declare
from lightning_d9m.cli.report import check_output, compare_chosen, compare_pair, write_page
from lightning_d9m.comparison.ledgers import Comparison
from lightning_d9m.errors import LedgerError, SettingError
from lightning_d9m.history.bundle import Manifest, find_located, open_bundle, write_bundle
from lightning_d9m.ledger.folder import Ledger
from lightning_d9m.output.bundle_text import format_bundle, name_sides
from lightning_d9m.output.columns import format_markdown
from lightning_d9m.output.comparison_text import state_verdict
from lightning_d9m.output.html_page import render_page
from lightning_d9m.output.terminal import find_command, format_next_steps, print_lines, wrap
from lightning_d9m.text import printable

_OPEN = "open"
_PAIR = 2

_ARGUMENTS = """
paths:PATH*  two ledgers, or a folder that d9m locate or d9m repeat left (default: the last two
    ledgers in the working folder); or the word open and a bundle
-o, --output FILE  the bundle to write (default: d9m-bundle.zip). After open: an HTML file for the
    report of its ledgers
--add PATH ...  a file or folder, such as a checkpoint or a log, that is added as it is; may be
    given several times
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``d9m bundle``."""
    parser.usage = (
        "d9m bundle [-o FILE] [--add PATH] [--format FORMAT | --json] [-v]\n"
        "                  [REFERENCE [THIS_RUN]]\n"
        "       d9m bundle open [-o REPORT] [--format FORMAT | --json] [-v] FILE"
    )
    declare(parser, _ARGUMENTS, paths={"type": str}, add={"default": []})
    add_format_arguments(parser)
    declare(parser, "-v, --verbose  show whole digests and the bits of numbers")


def run(arguments: argparse.Namespace) -> int:
    """Write or open a bundle; return 0 if its ledgers are equal, else 1."""
    if arguments.paths[:1] == [_OPEN]:
        return _open(arguments)
    return _write(arguments)


def _write(arguments: argparse.Namespace) -> int:
    paths = [Path(path) for path in arguments.paths]
    if len(paths) > _PAIR:
        raise SettingError(
            f"{len(paths)} paths were given: {shlex.join(map(str, paths))}. Give two ledgers, or "
            "one folder; add other files with --add."
        )
    output = arguments.output or Path("d9m-bundle.zip")
    located, compared = find_located(paths[-1]) if paths else ({}, [])
    if len(paths) == 1:
        paths = compared or paths
    arguments.expected, arguments.actual = [*paths, None, None][:_PAIR]
    found = compare_chosen(arguments)
    if output.exists():
        raise LedgerError(
            f"{output} exists already, so no bundle was written. Give another file with --output, "
            "or remove it."
        )
    located = located or find_located(found.ledgers[1].path)[0]
    command = find_command(found.ledgers)
    write_bundle(output, found.ledgers, found.comparison.verdict, command, located, arguments.add)
    # From the archive: what is shown is what others see.
    with open_bundle(output) as (manifest, ledgers):
        _show(arguments, manifest, name_sides(found.comparison), ledgers, output)
    return 0 if found.comparison.equal else 1


def _open(arguments: argparse.Namespace) -> int:
    if len(arguments.paths) != _PAIR or arguments.add:
        raise SettingError(
            "d9m bundle open takes one bundle and nothing to add to it: d9m bundle open FILE"
        )
    if arguments.output is not None:
        check_output(arguments.output, force=False)
    with open_bundle(Path(arguments.paths[1])) as (manifest, ledgers):
        found = compare_pair(*ledgers)
        comparison = name_sides(found.comparison)
        if arguments.output is not None:
            write_page(arguments.output, render_page(comparison, found.timeline, found.ledgers))
        _show(arguments, manifest, comparison, ledgers, None)
    return 0 if comparison.equal else 1


def _show(
    arguments: argparse.Namespace,
    manifest: Manifest,
    comparison: Comparison,
    ledgers: list[Ledger],
    written: Path | None,
) -> None:
    if arguments.format == "json":
        facts = msgspec.to_builtins(manifest) | {"comparison": comparison.as_json()}
        print(json.dumps(facts | {"bundle": str(written or arguments.paths[1])}, indent=2))
        return
    lines = format_bundle(manifest, comparison, ledgers, verbose=arguments.verbose)
    if arguments.format == "markdown":
        print(format_markdown(state_verdict(comparison), lines))
        return
    print_lines([*wrap(state_verdict(comparison)), "", *lines])
    if written is not None:
        name = printable(shlex.quote(str(written)))
        print(f"\nbundle: {name}")
        steps = [(f"d9m bundle open {name}", "shows this again")]
        if manifest.locate is None and not comparison.equal:
            command = printable(manifest.command or "COMMAND")
            steps.insert(0, (f"d9m locate -- {command}", "finds the line, for a new bundle"))
        print("\n".join(format_next_steps(steps)))
