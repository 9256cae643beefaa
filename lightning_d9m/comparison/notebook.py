"""A comparison as HTML, as a notebook shows it."""

from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_d9m.comparison.result import Comparison

_COLORS = {"equal": "#1a7f37", "different": "#cf222e", "not comparable": "#9a6700"}
_MOST_ROWS = 20
_MOST_CHARACTERS = 200


def render_html(comparison: "Comparison") -> str:
    """Return the verdict, the ledgers, and what differs, as a fragment of HTML.

    Names come from ledgers, which may have any origin; they are escaped.
    """
    verdict = comparison.verdict
    records = sum(rank.records for rank in comparison.ranks)
    parts = [
        f'<p><b style="color:{_COLORS[verdict]}">{verdict}</b>: {records} records compared</p>',
        _table(("", "ledger"), [("reference", comparison.expected), ("run", comparison.actual)]),
    ]
    fields = [*comparison.refusals, *comparison.stack, *comparison.settings]
    if fields:
        rows = [(entry.field, entry.expected, entry.actual) for entry in fields]
        parts.append(_table(("differs", "reference", "run"), rows))
    if comparison.divergences:
        found = [
            (at.rank, at.epoch, at.step, at.batch, at.kind, at.name, f"{at.count} of {at.compared}")
            for at in comparison.divergences
        ]
        titles = ("rank", "epoch", "step", "batch", "kind", "first difference", "differing")
        parts.append(_table(titles, found))
    return "".join(parts)


def _table(titles: Sequence[str], rows: Sequence[Iterable[object]]) -> str:
    head = "".join(f"<th>{title}</th>" for title in titles)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows[:_MOST_ROWS])
    more = f"<p>and {len(rows) - _MOST_ROWS} more</p>" if len(rows) > _MOST_ROWS else ""
    return f"<table><tr>{head}</tr>{body}</table>{more}"


def _cell(value: object) -> str:
    return f"<td>{escape('' if value is None else str(value)[:_MOST_CHARACTERS])}</td>"
