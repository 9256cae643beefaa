"""A bundle as text, for a terminal and for an issue."""

from collections.abc import Sequence

from rich.filesize import decimal

from lightning_d9m.comparison.ledgers import Comparison
from lightning_d9m.history.bundle import Manifest
from lightning_d9m.ledger.folder import Ledger
from lightning_d9m.output.columns import Column, format_table
from lightning_d9m.output.comparison_text import format_evidence
from lightning_d9m.output.html_page import list_run_facts
from lightning_d9m.output.terminal import wrap
from lightning_d9m.text import escape, pluralize, printable

_LONGEST = 1_024
_SHOWN = 20
_COLUMNS = (
    Column[tuple[str, int]]("file", lambda row: escape(row[0])),
    Column[tuple[str, int]]("size", lambda row: decimal(row[1]), is_number=True),
)


def format_bundle(
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
