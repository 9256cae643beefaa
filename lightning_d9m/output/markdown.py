"""Results in Markdown."""

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
