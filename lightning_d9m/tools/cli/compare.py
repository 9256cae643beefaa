"""``d9m compare``: compare two ledgers and name the first divergence."""

import argparse
import html
import shlex
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from lightning_d9m.engine.ledger.folder import Ledger, read_ledger, search_ledgers
from lightning_d9m.errors import LedgerError, SettingError, file_errors
from lightning_d9m.text import describe_names, escape, pluralize, printable
from lightning_d9m.tools.cli.arguments import FORMAT, LEDGERS, choose_ledgers
from lightning_d9m.tools.comparison.ledgers import compare_ledgers
from lightning_d9m.tools.comparison.noise import LEVEL, NoiseVerdict, ValueChange, judge_change
from lightning_d9m.tools.history.bundle import list_located
from lightning_d9m.tools.launch.progress import show_progress
from lightning_d9m.tools.output.columns import Column, format_table, print_result
from lightning_d9m.tools.output.comparison_text import format_evidence, state_verdict
from lightning_d9m.tools.output.html_page import HEIGHT, WIDTH, draw_chart, draw_key
from lightning_d9m.tools.output.terminal import find_command, list_next_steps, wrap

_COLUMNS = (
    Column[ValueChange]("value", lambda value: escape(value.name)),
    Column[ValueChange]("reference", lambda value: f"{value.expected:.6g}", is_number=True),
    Column[ValueChange]("this run", lambda value: f"{value.actual:.6g}", is_number=True),
    Column[ValueChange]("change", lambda value: f"{value.change:+.3g}", is_number=True),
    Column[ValueChange]("noise (s)", lambda value: f"{value.deviation:.3g}", is_number=True),
    Column[ValueChange]("chance", lambda value: _describe_chance(value.chance), is_number=True),
)
_SMALLEST = 0.001
ARGUMENTS = f"""{LEDGERS}{FORMAT}
-v, --verbose  show whole digests and the bits of numbers
--noise DIR ...  compare the difference of the two trainings with that of runs without the change: a
    folder with at least three, as d9m repeat or d9m audit model leaves it; may be given several
    times. Exit status 0: noise explains the difference
--plot FILE  with --noise: write change and noise by epoch as an SVG
"""
EXAMPLE = "d9m compare d9m-runs/000/run-001 d9m-runs/000/run-002"


def run(arguments: argparse.Namespace) -> int:
    """Compare two ledgers, print the result, and return 0 if they are equal, else 1."""
    paths = choose_ledgers(arguments)
    expected, actual = map(read_ledger, paths)
    if arguments.noise:
        return _compare_with_noise(arguments, expected, actual)
    if arguments.plot:
        raise SettingError(
            "--plot is only for --noise, the runs that show what noise does. Add --noise DIR, or "
            "leave it out."
        )
    with show_progress("records compared") as progress:
        comparison = compare_ledgers(expected, actual, progress=progress)
    located, steps = list_located((expected, actual)), []
    if comparison.verdict == "different" and not located:
        command = f"-- {printable(find_command((expected, actual)) or 'COMMAND')}"
        steps = list_next_steps(command, printable(shlex.join(map(str, paths))))
    lines = [*format_evidence(comparison, verbose=arguments.verbose), *located]
    verdict = state_verdict(comparison)
    print_result(arguments.format, comparison.as_json(), lines, verdict, steps=steps)
    return 0 if comparison.equal else 1


def _compare_with_noise(arguments: argparse.Namespace, expected: Ledger, actual: Ledger) -> int:
    """Print whether noise explains the difference; return 0 if it does, else 1."""
    noise = [ledger for folder in arguments.noise for ledger in _list_noise(folder, expected)]
    with show_progress("runs read") as progress:
        found = judge_change(expected, actual, noise, progress)
    if arguments.plot is not None:
        with file_errors(LedgerError, f"The plot {arguments.plot} cannot be written"):
            arguments.plot.write_text(_draw_noise(found), encoding="utf-8")
    sentence = _state_noise(found)
    facts = {"verdict": found.verdict, "sentence": sentence, **asdict(found)}
    del facts["lines"]
    print_result(arguments.format, facts, _format_noise(found), sentence)
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


def _describe_chance(chance: float) -> str:
    """Return a probability in percent.

    >>> _describe_chance(0.0), _describe_chance(0.0123), _describe_chance(0.4)
    ('<0.1%', '1.2%', '40%')
    """
    if chance < _SMALLEST:
        return "<0.1%"
    return f"{chance:.1%}" if chance < 2 * LEVEL else f"{chance:.0%}"


def _state_noise(found: NoiseVerdict) -> str:
    """Return the verdict as one sentence, which can be pasted into an issue."""
    value = found.values[0]
    if not value.change:
        return f"{found.verdict}: no logged value changes, and {found.runs} show the noise."
    name = escape(value.name)
    spread = max(value.noise) - min(value.noise)
    if not spread:
        return (
            f"{found.verdict}: {name} changes by {value.change:+.3g}, and {found.runs} all agree."
        )
    of = f", of {pluralize(len(found.values), 'value')} the clearest," if found.values[1:] else ""
    return (
        f"{found.verdict}: {name}{of} changes by {value.change:+.3g}, and {found.runs} spread over "
        f"{spread:.3g}. Noise alone changes it that much in {_describe_chance(value.chance)} of "
        "pairs of runs."
    )


def _format_noise(found: NoiseVerdict) -> list[str]:
    """Return the lines of the result below the verdict."""
    lines = format_table(_COLUMNS, found.values).splitlines()
    if found.left_out:
        names = describe_names(found.left_out, len(found.left_out))
        lines += wrap(f"Left out, because some run has no finite value: {names}.")
    return lines


def _draw_noise(found: NoiseVerdict) -> str:
    """Return a plot of the first value of all runs at the ends of epochs, as an SVG file."""
    what = html.escape(escape(found.values[0].name))
    legend = "".join(
        f'<g transform="translate({8 + 160 * number} 26)">{draw_key(number)}'
        f'<text x="32" y="9">{name}</text></g>'
        for number, name in enumerate(("reference", "this run", "others: without the change"))
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{46 + HEIGHT}">'
        "<style>text{font:12px sans-serif}.axis{stroke:#888}</style>"
        f'<rect width="100%" height="100%" fill="white"/><text x="8" y="16">{what}</text>{legend}'
        f'<g transform="translate(0 46)">{draw_chart("Values", found.lines, name="run")}</g></svg>'
    )
