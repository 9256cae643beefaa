"""A comparison as HTML, as a notebook shows it."""

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from jinja2 import Template

Table: TypeAlias = tuple[Sequence[str], Sequence[Sequence[object]]]

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


def render_html(verdict: str, records: int, tables: Sequence[Table]) -> str:
    """Return a verdict and what differs as a fragment of HTML.

    Names come from ledgers, which may have any origin; they are escaped.

    Args:
        verdict: The verdict.
        records: How many records were compared.
        tables: Titles and rows of each table; a table without rows is left out.
    """
    color = _COLORS.get(verdict, _UNPROVEN)
    return _load_template().render(verdict=verdict, color=color, records=records, tables=tables)


@cache
def _load_template() -> "Template":
    from jinja2 import Environment

    return Environment(autoescape=True, trim_blocks=True).from_string(_FRAGMENT)
