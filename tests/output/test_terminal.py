"""Tables and paragraphs on a terminal."""

import sys

import pytest

from lightning_d9m.output.terminal import make_table, render, style, wrap, wrap_on_terminal


def test_a_name_in_brackets_is_not_a_style():
    """Rich reads ``[bold]`` in a string as markup, and would leave it out."""
    table = make_table(("name", ""), [("layers[bold].weight", style("equal"))])
    assert render(table, 80, plain=True).splitlines() == [
        "name",
        "layers[bold].weight  equal",
    ]


def test_a_path_is_not_broken():
    path = "/data/" + "run-1" * 30
    assert wrap(f"See {path} there.", "  ", "- ") == ["- See", f"  {path}", "  there."]


@pytest.mark.parametrize("on_terminal", [False, True])
def test_a_long_line_is_wrapped_on_a_terminal_only(on_terminal, monkeypatch):
    """Words and paths are not broken, and an empty line stays."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: on_terminal)
    lines = ["word " * 19 + "last", "", "folder/" * 12]
    shown = wrap_on_terminal(lines)
    if on_terminal:
        long, indented, *rest = shown
        assert len(long) <= 80
        assert indented.startswith("  word")
        assert (f"{long} {indented.strip()}", rest) == (lines[0], lines[1:])
    else:
        assert shown == lines
