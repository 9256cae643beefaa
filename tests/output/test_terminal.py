"""Tables and paragraphs on a terminal."""

from lightning_d9m.tools.output.terminal import make_table, render, style


def test_a_name_in_brackets_is_not_a_style():
    """Rich reads ``[bold]`` in a string as markup, and would leave it out."""
    table = make_table(("name", ""), [("layers[bold].weight", style("equal"))])
    assert render(table, 80, plain=True).splitlines() == [
        "name",
        "layers[bold].weight  equal",
    ]
