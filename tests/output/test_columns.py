"""Tables on a terminal."""

from lightning_d9m.tools.output.columns import Column, format_table


def test_a_name_in_brackets_is_not_a_style():
    """Rich reads ``[bold]`` in a string as markup, and would leave it out."""
    columns = [Column("name", str), Column("", lambda _: "equal", meaning=lambda _: "equal")]
    assert format_table(columns, ["layers[bold].weight"]).splitlines() == [
        "name",
        "layers[bold].weight  equal",
    ]
