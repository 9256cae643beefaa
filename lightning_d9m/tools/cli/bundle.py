"""``d9m bundle``: pack two ledgers and what is known of their difference, and open such a file."""

import argparse
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
from rich.filesize import decimal

from lightning_d9m.engine.ledger.folder import Ledger
from lightning_d9m.errors import SettingError
from lightning_d9m.text import escape, pluralize, printable
from lightning_d9m.tools.cli.arguments import FORMAT, check_new_file
from lightning_d9m.tools.cli.report import check_output, compare_chosen, compare_pair, write_page
from lightning_d9m.tools.comparison.ledgers import Comparison
from lightning_d9m.tools.history.bundle import (
    SIDES,
    Manifest,
    find_located,
    open_bundle,
    write_bundle,
)
from lightning_d9m.tools.output.columns import Column, format_table, print_result
from lightning_d9m.tools.output.comparison_text import format_evidence, state_verdict
from lightning_d9m.tools.output.html_page import list_run_facts, render_page
from lightning_d9m.tools.output.terminal import find_command, wrap

_OPEN = "open"
_PAIR = 2
_LONGEST = 1_024
_SHOWN = 20
_COLUMNS = (
    Column[tuple[str, int]]("file", lambda row: escape(row[0])),
    Column[tuple[str, int]]("size", lambda row: decimal(row[1]), is_number=True),
)

ARGUMENTS = f"""
paths:PATH*  two ledgers, or a folder that d9m locate or d9m repeat left (default: the last two
    ledgers in the working folder); or the word open and a bundle
-o, --output FILE  the bundle to write (default: d9m-bundle.zip). After open: an HTML file for the
    report of its ledgers
--add PATH ...  a file or folder, such as a checkpoint or a log, that is added as it is; may be
    given several times
{FORMAT}
-v, --verbose  show whole digests and the bits of numbers
"""
EXAMPLE = "d9m bundle d9m-runs/000 --add train.py"
SETTINGS: dict[str, dict[str, object]] = {"paths": {"type": str}, "add": {"default": []}}


def run(arguments: argparse.Namespace) -> int:
    """Write or open a bundle; return 0 if its ledgers are equal, else 1."""
    paths = [Path(path) for path in arguments.paths]
    if arguments.paths[:1] != [_OPEN]:
        output = arguments.output or Path("d9m-bundle.zip")
        _write(arguments, paths, output)
        # From the archive: what is shown is what others see.
        return _show(arguments, output, is_new=True)
    if len(paths) != _PAIR or arguments.add:
        raise SettingError(
            "d9m bundle open takes one bundle and nothing to add to it: d9m bundle open FILE"
        )
    if arguments.output is not None:
        check_output(arguments.output, force=False)
    return _show(arguments, paths[1], page=arguments.output)


def _write(arguments: argparse.Namespace, paths: list[Path], output: Path) -> None:
    if len(paths) > _PAIR:
        raise SettingError(
            f"{len(paths)} paths were given: {shlex.join(map(str, paths))}. Give two ledgers, or "
            "one folder; add other files with --add."
        )
    located, compared = find_located(paths[-1]) if paths else ({}, [])
    if len(paths) == 1:
        paths = compared or paths
    arguments.expected, arguments.actual = [*paths, None, None][:_PAIR]
    ledgers = compare_chosen(arguments).ledgers
    check_new_file(output)
    write_bundle(output, ledgers, located or find_located(ledgers[1].path)[0], arguments.add)


def _show(
    arguments: argparse.Namespace, path: Path, *, page: Path | None = None, is_new: bool = False
) -> int:
    """Print a bundle, and write its report."""
    with open_bundle(path) as (manifest, ledgers):
        found = compare_pair(*ledgers)
        comparison = replace(found.comparison, expected=Path(SIDES[0]), actual=Path(SIDES[1]))
        if page is not None:
            located = manifest.locate or {}, manifest.report
            write_page(page, render_page(replace(found, comparison=comparison, located=located)))
        facts = msgspec.to_builtins(manifest)
        facts |= {"comparison": comparison.as_json(), "bundle": str(path)}
        lines = _format_bundle(manifest, comparison, ledgers, verbose=arguments.verbose)
        command = printable(find_command(ledgers) or "COMMAND")
    steps = []
    if arguments.format == "text" and is_new:
        name = printable(shlex.quote(str(path)))
        if manifest.locate is None and not comparison.equal:
            steps = [(f"d9m locate -- {command}", "finds the line, for a new bundle")]
        steps.append((f"d9m bundle open {name}", "shows this again"))
        lines += ["", f"bundle: {name}"]
    print_result(arguments.format, facts, lines, state_verdict(comparison), steps=steps)
    return 0 if comparison.equal else 1


def _format_bundle(
    manifest: Manifest, comparison: Comparison, ledgers: Sequence[Ledger], *, verbose: bool = False
) -> list[str]:
    """Return the lines of a bundle: what ran, what d9m locate found, what differs, the files."""
    ran = list(list_run_facts(ledgers))
    width = max(len(name) for name, _ in ran) + 1
    lines = []
    for name, values in ran:
        shown = (escape(value, _LONGEST) or "not recorded" for value in dict.fromkeys(values))
        lines.append(f"{f'{name}:':{width}} {' / '.join(shown)}")
    if manifest.report:
        lines += ["", "d9m locate:", *map(printable, manifest.report)]
    lines += ["", *format_evidence(comparison, verbose=verbose), ""]
    sizes = sorted(manifest.sizes.items(), key=lambda entry: (-entry[1], entry[0]))
    if left := sizes[_SHOWN:]:
        sizes[_SHOWN:] = [(f"{len(left)} more", sum(size for _, size in left))]
    lines += format_table(_COLUMNS, sizes).splitlines()
    removed = pluralize(manifest.secrets, "secret")
    return [*lines, *wrap(f"{removed} removed. Look through the bundle before you publish it.")]
