"""A comparison as HTML, as a notebook shows it."""

from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jinja2 import Template

    from lightning_d9m.comparison.result import Comparison

_COLORS = {"equal": "#1a7f37", "different": "#cf222e"}
_UNPROVEN = "#9a6700"
_FRAGMENT = """\
<p><b style="color:{{ color }}">{{ verdict }}</b>: {{ records }} records compared</p>
{% for titles, rows in tables if rows %}
<table><tr>{% for title in titles %}<th>{{ title }}</th>{% endfor %}</tr>
{% for row in rows[:20] %}
<tr>{% for cell in row %}<td>{{ "" if cell is none else (cell | string)[:200] }}</td>{% endfor %}
</tr>
{% endfor %}
</table>
{% if rows[20:] %}<p>and {{ rows[20:] | length }} more</p>{% endif %}
{% endfor %}
"""


def render_html(comparison: "Comparison") -> str:
    """Return the verdict, the ledgers, and what differs, as a fragment of HTML.

    Names come from ledgers, which may have any origin; they are escaped.
    """
    fields = [*comparison.refusals, *comparison.stack, *comparison.settings]
    places = [
        (at.rank, at.epoch, at.step, at.batch, at.kind, at.name, f"{at.count} of {at.compared}")
        for at in comparison.divergences
    ]
    return _load_template().render(
        verdict=comparison.verdict,
        color=_COLORS.get(comparison.verdict, _UNPROVEN),
        records=sum(rank.records for rank in comparison.ranks),
        tables=[
            (("", "ledger"), [("reference", comparison.expected), ("this run", comparison.actual)]),
            (
                ("differs", "reference", "this run"),
                [(entry.field, *entry.shown) for entry in fields],
            ),
            (("rank", "epoch", "step", "batch", "kind", "first difference", "differing"), places),
        ],
    )


@cache
def _load_template() -> "Template":
    from jinja2 import Environment

    return Environment(autoescape=True, trim_blocks=True).from_string(_FRAGMENT)
