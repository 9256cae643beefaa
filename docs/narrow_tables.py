"""Mark tables that are too wide for a phone: a hook that mkdocs calls (``hooks`` in mkdocs.yml).

A table whose longest words do not fit beside each other on a phone gets the class ``stacked``, and
each of its cells the title of its column. On a phone style.css then shows a row as a block, with
one cell below the other.
"""

import re

# About so many characters fit beside each other in the tables of a phone.
_FITTING = 30
_TABLE = re.compile(r"<table>(.*?)</table>", re.DOTALL)
_ROW = re.compile(r"<tr>(.*?)</tr>", re.DOTALL)
_CELL = re.compile(r"<t[hd][^>]*>(.*?)</t[hd]>", re.DOTALL)
_TAG = re.compile(r"<[^>]*>")


def on_page_content(html: str, **_: object) -> str:
    """Return a page whose wide tables are marked."""
    return _TABLE.sub(_mark, html)


def _mark(table: re.Match[str]) -> str:
    rows = [_CELL.findall(row) for row in _ROW.findall(table[1])]
    widths = (max(map(_measure, column)) for column in zip(*rows, strict=True))
    if sum(widths) <= _FITTING:
        return table[0]
    titles = [_TAG.sub("", title) for title in rows[0]]

    def label(row: re.Match[str]) -> str:
        names = iter(titles)
        return re.sub("<td", lambda _: f'<td data-title="{next(names)}"', row[0])

    return f'<table class="stacked">{_ROW.sub(label, table[1])}</table>'


def _measure(cell: str) -> int:
    """Return the length of the longest word of a cell."""
    return max(map(len, _TAG.sub("", cell).split()), default=0)
