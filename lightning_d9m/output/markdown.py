"""Tables in Markdown."""

from collections.abc import Sequence


def short(figure: float | None) -> str:
    """Return a figure in three digits; nothing for None.

    >>> short(0.00012345), short(0.0), short(None)
    ('0.000123', '0', '')
    """
    return "" if figure is None else f"{figure:.3g}"


def markdown_table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    r"""Return a table.

    >>> print(markdown_table(("op", "Vc"), [("a|b", "0")]))
    | op | Vc |
    | --- | --- |
    | a\|b | 0 |
    """
    lines = [titles, ["---"] * len(titles), *rows]
    escaped = ([cell.replace("|", "\\|") for cell in line] for line in lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in escaped)
