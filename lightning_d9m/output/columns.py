"""The columns of a result, described once for its table on a terminal and for Markdown."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from lightning_d9m.output.markdown import markdown_table
from lightning_d9m.output.terminal import make_table, measure, render, style

Row = TypeVar("Row")


@dataclass(frozen=True)
class Column(Generic[Row]):
    """A column.

    Attributes:
        title: Its title.
        cell: Returns the cell of a row.
        is_number: Whether its cells end at one place on a terminal.
        has_meaning: Whether its cells are words that have a color on a terminal.
    """

    title: str
    cell: Callable[[Row], str]
    is_number: bool = False
    has_meaning: bool = False


def format_table(
    columns: Sequence[Column[Row]], rows: Sequence[Row], width: int = 0, *, plain: bool = True
) -> str:
    """Return a table as text; where the width is too small, lines are longer and nothing is cut."""
    cells = [
        [style(one.cell(row)) if one.has_meaning else one.cell(row) for one in columns]
        for row in rows
    ]
    table = make_table([one.title for one in columns], cells)
    for made, column in zip(table.columns, columns, strict=True):
        made.justify = "right" if column.is_number else "left"
    return render(table, max(width, measure(table)), plain=plain)


def format_markdown_table(columns: Sequence[Column[Row]], rows: Sequence[Row]) -> str:
    r"""Return a table in Markdown.

    >>> print(format_markdown_table([Column("op", str), Column("Vc", repr)], ["a|b"]))
    | op | Vc |
    | --- | --- |
    | a\|b | 'a\|b' |
    """
    cells = [[one.cell(row) for one in columns] for row in rows]
    return markdown_table([one.title for one in columns], cells)
