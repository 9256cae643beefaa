"""A bundle as text, for a terminal and for an issue."""

from collections.abc import Iterator, Sequence

from lightning_d9m.comparison.ledgers import Comparison
from lightning_d9m.history.bundle import SIDES, Excerpt, Manifest
from lightning_d9m.ledger.folder import Ledger
from lightning_d9m.output.columns import Column, format_table
from lightning_d9m.output.comparison_text import format_evidence
from lightning_d9m.output.html_page import list_run_facts
from lightning_d9m.output.terminal import wrap
from lightning_d9m.text import escape, pluralize, printable

_LONGEST = 1_024
_SHOWN = 20
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")
_UNIT = 1024


def format_bundle(
    manifest: Manifest, comparison: Comparison, ledgers: Sequence[Ledger], *, verbose: bool = False
) -> list[str]:
    """Return the lines of a bundle: what ran, what d9m locate found, what differs, the files."""
    lines = list(_format_facts(ledgers))
    if manifest.report:
        lines += ["", "d9m locate:", *map(printable, manifest.report)]
    for excerpt in manifest.excerpts:
        lines += ["", *_format_excerpt(excerpt)]
    lines += ["", *format_evidence(comparison, verbose=verbose), "", *_format_files(manifest)]
    removed = pluralize(manifest.secrets, "secret")
    return [*lines, *wrap(f"{removed} removed. Look through the bundle before you publish it.")]


def _format_facts(ledgers: Sequence[Ledger]) -> Iterator[str]:
    facts = list(list_run_facts(ledgers))
    width = max(len(name) for name, _ in facts) + 1
    for name, values in facts:
        shown = [escape(value, _LONGEST) for value in dict.fromkeys(values)]
        yield f"{f'{name}:':{width}} {' / '.join(value or 'not recorded' for value in shown)}"


def _format_excerpt(excerpt: Excerpt) -> Iterator[str]:
    yield f"{escape(excerpt.file, _LONGEST)}, line {excerpt.line}:"
    for number, text in enumerate(excerpt.text, start=excerpt.first):
        mark = ">" if number == excerpt.line else " "
        yield f"{mark} {number:5} {printable(text)}".rstrip()


def _format_files(manifest: Manifest) -> list[str]:
    sizes = sorted(manifest.sizes.items(), key=lambda entry: (-entry[1], entry[0]))
    rows = [(escape(name), format_size(size)) for name, size in sizes[:_SHOWN]]
    if left := sizes[_SHOWN:]:
        rows.append((f"{len(left)} more", format_size(sum(size for _, size in left))))
    columns = [
        Column[tuple[str, str]]("file", lambda row: row[0]),
        Column[tuple[str, str]]("size", lambda row: row[1], is_number=True),
    ]
    return format_table(columns, rows).splitlines()


def format_size(size: float) -> str:
    """Return a number of bytes in its largest unit.

    >>> format_size(12), format_size(1536)
    ('12 bytes', '1.5 KiB')
    """
    power = 0
    while size >= _UNIT and power < len(_UNITS) - 1:
        size, power = size / _UNIT, power + 1
    return f"{size:.{1 if power else 0}f} {_UNITS[power]}"


def name_sides(comparison: Comparison) -> Comparison:
    """Return a comparison whose ledgers have their names in the archive."""
    from dataclasses import replace
    from pathlib import Path

    return replace(comparison, expected=Path(SIDES[0]), actual=Path(SIDES[1]))
