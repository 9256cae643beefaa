"""The drawings show what was measured where it belongs, and nothing between."""

import math
from xml.etree import ElementTree as ET

import pytest

from lightning_d9m.tools.comparison.timeline import StepTable
from lightning_d9m.tools.output.html_page import (
    WIDTH,
    _list_located,
    draw_chart,
    draw_key,
    draw_row,
)


def parse(drawing):
    return ET.fromstring(drawing)  # noqa: S314 - our own


def test_lines_end_where_nothing_is_known_and_zero_lies_below():
    first = [(10, 0.0), (20, 1e-6), (30, 1e-5), (40, math.nan), (50, 1e-2)]
    second = [(10, 1e-4), (20, math.inf), (30, 1e-3)]
    root = parse(draw_chart("sizes", [first, second], log=True))
    dots = list(root.iter("circle"))
    steps = [own for own in root.iter("rect") if own.get("class") == "step"]
    # Under the pointer, anywhere near a step, are the values of all lines there.
    assert [own[0].text for own in steps[:2]] == [
        "step 10\nline 1: 0\nline 2: 0.0001",
        "step 20\nline 1: 1e-06\nline 2: inf",
    ]
    assert sum(float(own.get("width")) for own in steps) == pytest.approx(WIDTH, abs=0.5)
    assert "logarithmic scale" in root.get("aria-label")
    left, right, *_ = [float(dot.get("cx")) for dot in dots]
    assert left < right
    zero, *heights = [float(dot.get("cy")) for dot in dots]
    assert zero > heights[0] > heights[1] > heights[3] > heights[4] > heights[2]
    # From 1e-6 to 1e-2: each power is as high as the next.
    assert heights[0] - heights[1] == pytest.approx(heights[4] - heights[2], abs=0.2)
    lines = [own.get("points").split() for own in root.iter("polyline")]
    assert [len(points) for points in lines] == [3, 1, 1, 1]
    texts = [own.text for own in root.iter("text")]
    assert {"1e-6", "1e-4", "1e-2", "steps at the ends of epochs"} <= set(texts)


def test_twelve_lines_differ_from_each_other_without_their_colors_too():
    root = parse(draw_chart("losses", [[(1, float(n)), (2, float(n))] for n in range(12)]))
    styles = [own.get("style") for own in root.iter("polyline")]
    assert len(set(styles)) == len(styles)
    assert len({style.partition("dasharray")[2] for style in styles[1:]}) > 3
    assert draw_key(1) != draw_key(5)


def cells_of(table, row):
    """Return (class, first column, columns, title) of each cell of a row."""
    most = max(cell[0] for cells in table.rows.values() for cell in cells.values())
    drawing = draw_row(table.rows.get(row, {}), table, most)
    return [
        (cell.get("class"), int(cell.get("x")), int(cell.get("width")), cell.find("{*}title").text)
        for cell in (parse(drawing).iter("rect") if drawing else ())
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
