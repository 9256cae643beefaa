"""The tables and drawings show what was measured where it belongs, and nothing between."""

import math
from xml.etree import ElementTree as ET

import pytest

from lightning_d9m.tools.comparison.timeline import StepTable
from lightning_d9m.tools.output.html_page import _list_located, _list_values, draw_row


def test_logged_values_are_shown_where_they_differ_first_and_most():
    same = [(9, -0.0, -0.0), (18, math.nan, math.nan)]
    pairs = [(9, 0.5, 0.5), (18, 0.0, -0.0), (27, 1.0, 0.75), (36, 1.0, math.inf), (45, 2.0, 2.25)]
    assert list(_list_values({"a": same, "loss": pairs, "b": [(9, None, 3.0)]})) == [
        ("a", "equal", "", "", "", ""),
        ("loss", 18, "0.0", "-0.0", "0.25", 27),
        ("b", 9, "missing", "3.0", "", ""),
    ]


def cells_of(table, row):
    """Return (class, first column, columns, title) of each cell of a row."""
    most = max(cell[0] for cells in table.rows.values() for cell in cells.values())
    drawing = draw_row(table.rows.get(row, {}), table, most)
    return [
        (cell.get("class"), int(cell.get("x")), int(cell.get("width")), cell.find("{*}title").text)
        for cell in (ET.fromstring(drawing).iter("rect") if drawing else ())  # noqa: S314 - our own
    ]


def test_a_row_shows_what_is_equal_different_alone_and_not_recorded():
    table = StepTable()
    for step in (0, 1, 2, 3, 4, 9, 10):
        table.add("a", step)
    for step, differing, alone in ((3, 2, 0), (4, 3, 1), (9, 100, 0), (10, 0, 3)):
        table.add("a", step, differing, alone)
    assert cells_of(table, "a") == [
        ("same", 0, 3, "steps 0 to 2: equal"),
        ("heat-1", 3, 2, "steps 3 to 4: 5 differ"),
        ("heat-4", 9, 1, "step 9: 100 differ"),
        ("alone", 10, 1, "step 10: in one run only"),
    ]
    assert cells_of(table, "b") == []


@pytest.mark.parametrize(
    ("facts", "shown"),
    [
        ({}, []),
        ({"lines": 5, "op": "mm", "advice": "Wait."}, []),
        ({"lines": [3]}, []),
        (
            {"lines": None, "op": {"op": "aten.mm", "source": "a.py:3 in f"}, "advice": 7},
            [("Op", "aten.mm, called at a.py:3 in f"), ("Advice", "7")],
        ),
    ],
)
def test_what_was_located_may_have_any_form(facts, shown):
    assert _list_located(facts) == shown
