"""The columns of a result, described once for a terminal, Markdown and a page.

A row is a dataclass, whose fields are its JSON; its columns say how they look in a table.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from lightning_d9m.tools.output.terminal import format_next_steps, print_lines, style, wrap

Row = TypeVar("Row")


@dataclass(frozen=True)
class Column(Generic[Row]):
    """A column.

    Attributes:
        title: Its title.
        cell: Returns the cell of a row.
        is_number: Whether its cells end at one place on a terminal.
        meaning: Returns the word whose color the cell of a row has on a terminal; None for none.
    """

    title: str
    cell: Callable[[Row], str]
    is_number: bool = False
    meaning: Callable[[Row], str] | None = None


def format_table(
    columns: Sequence[Column[Row]], rows: Sequence[Row], *, plain: bool = True, width: int = 0
) -> str:
    """Return a table as text, with two spaces between columns; it has no lines.

    No header is shown if all titles are empty.

    Args:
        columns: Its columns.
        rows: Its rows.
        plain: Whether to leave out colors on a terminal too.
        width: The width at which cells are wrapped; 0 for lines of any length.
    """
    # Here and not above: rich takes a while to load, and JSON needs none of it.
    from rich.console import Console
    from rich.table import Table

    has_titles = any(column.title for column in columns)
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_header=has_titles)
    for column in columns:
        justify: Literal["left", "right"] = "right" if column.is_number else "left"
        table.add_column(column.title, header_style="bold", justify=justify)
    for row in rows:
        # rich would take brackets in a str for a style: "weight[bold]".
        table.add_row(
            *(style(own.meaning(row) if own.meaning else "", own.cell(row)) for own in columns)
        )
    # A console of the terminal's width would shrink the table to it, and wrap or cut its cells.
    width = width or Console(width=10_000).measure(table).maximum
    # With None rich finds out by itself, and heeds NO_COLOR and FORCE_COLOR.
    console = Console(width=width, highlight=False, force_terminal=False if plain else None)
    with console.capture() as capture:
        console.print(table)
    # rich fills each line with blanks up to the width, which would be copied with it.
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def list_cells(
    columns: Sequence[Column[Row]], rows: Sequence[Row]
) -> tuple[list[str], list[list[str]]]:
    """Return the titles and the cells of a table, for a page."""
    cells = [[column.cell(row) for column in columns] for row in rows]
    return [column.title for column in columns], cells


def format_markdown_table(columns: Sequence[Column[Row]], rows: Sequence[Row]) -> str:
    r"""Return a table in Markdown.

    >>> print(format_markdown_table([Column("op", str), Column("Vc", repr)], ["a|b"]))
    | op | Vc |
    | --- | --- |
    | a\|b | 'a\|b' |
    """
    titles, cells = list_cells(columns, rows)
    lines = [titles, ["---"] * len(titles), *cells]
    # A bar would begin a new cell.
    escaped = ([cell.replace("|", "\\|") for cell in line] for line in lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in escaped)


def short(figure: object) -> str:
    """Return a figure: a float in three digits, and nothing for None.

    >>> short(0.00012345), short(0.0), short(1000), short(None)
    ('0.000123', '0', '1000', '')
    """
    if isinstance(figure, float):
        return f"{figure:.3g}"
    return "" if figure is None else str(figure)


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
        word, colon, rest = verdict.partition(":")
        # The word of the verdict is bold, as it is colored on a terminal.
        parts = [f"**{word}**{colon}{rest}", *filter(None, [table])]
        # Fences in the evidence are broken up, so that they stay in their block.
        text = "\n".join(lines).replace("```", "` ` `")
        parts += [f"```text\n{text}\n```"] if lines else []
        print("\n\n".join(parts))
    else:
        lines = [*lines, *format_next_steps(steps)]
        print_lines([*wrap(verdict), "", *lines] if verdict else lines)
