"""The cells of the heat map are where the digests were compared, as dark as many differ."""

from xml.etree import ElementTree as ET

import pytest

from lightning_d9m.comparison.timeline import StepHistogram
from lightning_d9m.output.svg.heat_map import HeatMap, HeatMapRow


def steps_of(*counts):
    """Return a histogram of (step, differing)."""
    made = StepHistogram(64)
    for step, differing in counts:
        made.add(step, 1, differing)
    return made


def row_of(differing, *recorded):
    return HeatMapRow(
        steps_of(*differing), tuple(steps_of(*((s, 0) for s in part)) for part in recorded)
    )


def cells_of(drawing):
    """Return (class, first column, columns, title) of each cell."""
    return [
        (cell.get("class"), int(cell.get("x")), int(cell.get("width")), cell.find("title").text)
        for cell in ET.fromstring(drawing).iter("rect")  # noqa: S314 - our own
    ]


def test_a_row_shows_what_is_equal_different_and_not_recorded():
    row = row_of([(3, 2), (4, 3), (9, 100)], range(5), [9, 10])
    heat = HeatMap([row])
    assert heat.shades == [(0, 1, 2), (1, 3, 5), (2, 6, 15), (3, 16, 39), (4, 40, 100)]
    assert cells_of(heat.draw_row(row)) == [
        ("same", 0, 3, "steps 0 to 2: equal"),
        ("heat-0", 3, 1, "step 3: 2 differ"),
        ("heat-1", 4, 1, "step 4: 3 differ"),
        ("heat-4", 9, 1, "step 9: 100 differ"),
        ("same", 10, 1, "step 10: equal"),
    ]


def test_rows_share_columns_and_shades():
    """The second row alone would begin at its own first step, in its own darkest shade."""
    rows = [row_of([(2, 64)], range(2, 8)), row_of([(5, 1), (6, 1)], range(4, 8))]
    heat = HeatMap(rows)
    assert cells_of(heat.draw_row(rows[1])) == [
        ("same", 2, 1, "step 4: equal"),
        ("heat-0", 3, 2, "steps 5 to 6: 2 differ"),
        ("same", 5, 1, "step 7: equal"),
    ]
    axis = [node.text for node in ET.fromstring(heat.draw_axis({0: 2})).iter("text")]  # noqa: S314
    assert axis == ["epoch 0", "step 2", "7"]


@pytest.mark.parametrize("steps", [64, 65, 1000, 5000])
def test_many_steps_are_merged_and_none_is_lost(steps):
    """Rows of which few steps are kept have wider columns than others; all get the widest."""
    row = row_of([(step, 1) for step in range(steps)], range(steps))
    other = row_of([(steps - 1, 7)])
    heat = HeatMap([row, other])
    cells = cells_of(heat.draw_row(row))
    ends = [first + width for _, first, width, _ in cells]
    assert [first for _, first, _, _ in cells] == [0, *ends[:-1]]
    assert ends[-1] <= 64
    counts = [title.partition(": ")[2].split()[0] for *_, title in cells]
    assert sum(int(count.replace(",", "")) for count in counts) == steps
    ((_, first, width, _),) = cells_of(heat.draw_row(other))
    assert first + width == ends[-1]


def test_a_row_without_records_is_empty():
    blank = row_of([])
    heat = HeatMap([blank, row_of([], [0])])
    assert heat.draw_row(blank) == ""
    assert heat.shades == [(4, 1, 1)]
