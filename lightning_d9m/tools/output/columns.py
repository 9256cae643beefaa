"""The columns of a result, described once for a terminal, Markdown and a page.

A row is a dataclass, whose fields are its JSON; its columns say how they look in a table.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from lightning_d9m.tools.output.terminal import (
    format_next_steps,
    make_table,
    measure,
    print_lines,
    render,
    style,
    wrap,
)

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
    columns: Sequence[Column[Row]],
    rows: Sequence[Row],
    width: int = 0,
    *,
    plain: bool = True,
    optional: Sequence[str] = (),
) -> str:
    """Return a table as text; where the width is too small, lines are longer and nothing is cut.

    Args:
        columns: Its columns.
        rows: Its rows.
        width: The width of the terminal.
        plain: Whether to leave out colors on a terminal too.
        optional: Titles of columns that are left out, in this order, until the table fits.
    """
    for left_out in range(len(optional) + 1):
        shown = [column for column in columns if column.title not in optional[:left_out]]
        cells = [
            [style(one.cell(row)) if one.has_meaning else one.cell(row) for one in shown]
            for row in rows
        ]
        table = make_table([column.title for column in shown], cells)
        if measure(table) <= width:
            break
    for made, column in zip(table.columns, shown, strict=True):
        made.justify = "right" if column.is_number else "left"
    return render(table, max(width, measure(table)), plain=plain)


def format_markdown_table(columns: Sequence[Column[Row]], rows: Sequence[Row]) -> str:
    r"""Return a table in Markdown.

    >>> print(format_markdown_table([Column("op", str), Column("Vc", repr)], ["a|b"]))
    | op | Vc |
    | --- | --- |
    | a\|b | 'a\|b' |
    """
    cells = [[column.cell(row) for column in columns] for row in rows]
    return markdown_table([column.title for column in columns], cells)


def short(figure: object) -> str:
    """Return a figure: a float in three digits, and nothing for None.

    >>> short(0.00012345), short(0.0), short(1000), short(None)
    ('0.000123', '0', '1000', '')
    """
    if isinstance(figure, float):
        return f"{figure:.3g}"
    return "" if figure is None else str(figure)


def markdown_table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of texts in Markdown."""
    lines = [titles, ["---"] * len(titles), *rows]
    escaped = ([cell.replace("|", "\\|") for cell in line] for line in lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in escaped)


def format_markdown(verdict: str, evidence: Sequence[str], table: str = "") -> str:
    r"""Return a result as Markdown: the verdict, a table, and the evidence as it is printed.

    Fences in the evidence are broken up, so that they stay in their block.

    >>> print(format_markdown("equal: 5 records.", ["reference: a"]))
    **equal**: 5 records.
    <BLANKLINE>
    ```text
    reference: a
    ```
    """
    word, colon, rest = verdict.partition(":")
    parts = [f"**{word}**{colon}{rest}"]
    if table:
        parts.append(table)
    if evidence:
        lines = "\n".join(evidence).replace("```", "` ` `")
        parts.append(f"```text\n{lines}\n```")
    return "\n\n".join(parts)


def print_result(
    chosen: str,
    facts: object,
    lines: Sequence[str],
    verdict: str = "",
    table: str = "",
    steps: Sequence[tuple[str, str]] = (),
) -> None:
    """Print a result in the chosen format: its facts as JSON, or lines below a verdict.

    ``table`` is one in Markdown, for that format alone; ``steps``, the commands that help next and
    what each does, are for text.
    """
    if chosen == "json":
        print(json.dumps(facts, indent=2))
    elif chosen == "markdown":
        print(format_markdown(verdict, lines, table))
    else:
        lines = [*lines, *format_next_steps(steps)]
        print_lines([*wrap(verdict), "", *lines] if verdict else lines)
