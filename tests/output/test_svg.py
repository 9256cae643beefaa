"""The drawings show what was measured where it belongs, and nothing between."""

import math
import re
from xml.etree import ElementTree as ET

import pytest

from lightning_d9m.comparison.timeline import StepHistogram
from lightning_d9m.output.svg import LEFT, HeatMap, draw_chart, draw_key

# Pixels of a digit on a phone, where text is largest: 22 pixels high.
DIGIT = 13
EPOCHS = {0: 0, 1: 10, 2: 20, 3: 30}


def parse(drawing):
    return ET.fromstring(drawing)  # noqa: S314 - our own


def dots_of(root):
    """Return {title: (x, y)} of the dots of a chart."""
    return {
        dot[0].text: (float(dot.get("cx")), float(dot.get("cy"))) for dot in root.iter("circle")
    }


def test_an_epoch_is_named_below_its_steps():
    """The record at its end is at the tick before the next epoch."""
    root = parse(draw_chart("loss", [[(step, 1.0) for step in range(28)]], {0: 0, 1: 9}))
    names = {node.text: float(node.get("x")) for node in root.iter("text")}
    dots = {title.split()[3][:-1]: x for title, (x, _) in dots_of(root).items()}
    assert dots["0"] < names["epoch 0"] < dots["9"] < names["epoch 1"] < dots["27"]
    assert names["epoch 0"] == pytest.approx((dots["0"] + dots["9"]) / 2, abs=0.1)
    ticks = {float(node.get("x1")) for node in root.iter("line") if node.get("y2") == "178"}
    assert ticks == {dots["0"], dots["9"], dots["27"]}


@pytest.mark.parametrize("scale", [0.00956, 0.7874, 3.0, 12345.0, 2e-7, 6e9, -0.5, 1e-300])
def test_labels_of_values_fit_beside_the_axis(scale):
    root = parse(draw_chart("loss", [[(10, scale), (20, 2 * scale)]], EPOCHS))
    labels = [own.text for own in root.iter("text") if own.get("text-anchor") == "end"][:-1]
    assert len(labels) == 3
    longest = 6 if scale > 1e-100 else 8
    assert max(map(len, labels)) <= longest
    assert DIGIT * 6 < LEFT
    assert [float(label) for label in labels] == pytest.approx(
        sorted([scale, 1.5 * scale, 2 * scale]), rel=0.06
    )


def test_lines_end_where_nothing_is_known_and_zero_lies_below():
    first = [(10, 0.0), (20, 1e-6), (30, 1e-5), (40, math.nan), (50, 1e-2)]
    second = [(10, 1e-4), (20, math.inf), (30, 1e-3)]
    root = parse(draw_chart("sizes", [first, second], EPOCHS, log=True))
    dots = dots_of(root)
    assert list(dots)[:2] == ["line 1, step 10: 0", "line 1, step 20: 1e-06"]
    zero, *heights = [y for _, y in dots.values()]
    assert zero > heights[0] > heights[1] > heights[3] > heights[4] > heights[2]
    # From 1e-6 to 1e-2: each power is as high as the next.
    assert heights[0] - heights[1] == pytest.approx(heights[4] - heights[2], abs=0.2)
    lines = [own.get("points").split() for own in root.iter("polyline")]
    assert [len(points) for points in lines] == [3, 1, 1, 1]
    labels = [own.text for own in root.iter("text") if own.get("text-anchor") == "end"]
    assert labels[:6] == ["0", "1e-6", "1e-5", "1e-4", "1e-3", "1e-2"]


def test_each_of_nine_lines_has_a_style_of_its_own_that_the_legend_repeats():
    drawing = draw_chart("sizes", [[(10, 1.0 + n)] for n in range(9)], EPOCHS, log=True)
    styles = re.findall(r'<polyline points="[^"]*" style="([^"]*)"', drawing)
    assert len(set(styles)) == 9
    for number, style in enumerate(styles):
        color = style.split(";")[1].removeprefix("stroke:")
        assert color in draw_key(number)
        assert ("dasharray" in style) == ("dasharray" in draw_key(number)) == (number >= 6)


def row_of(differing, *recorded):
    """Return a histogram of (step, differing) and of steps at which nothing differs."""
    made = StepHistogram()
    for step, count in (*differing, *((s, 0) for part in recorded for s in part)):
        made.add(step, count)
    return made


def cells_of(drawing):
    """Return (class, first column, columns, title) of each cell."""
    return [
        (cell.get("class"), int(cell.get("x")), int(cell.get("width")), cell.find("title").text)
        for cell in parse(drawing).iter("rect")
    ]


def test_a_row_shows_what_is_equal_different_and_not_recorded():
    row = row_of([(3, 2), (4, 3), (9, 100)], range(5), [9, 10])
    heat = HeatMap([row, row_of([])])
    assert heat.shades == [(0, 1, 2), (1, 3, 5), (2, 6, 15), (3, 16, 39), (4, 40, 100)]
    assert cells_of(heat.draw_row(row)) == [
        ("same", 0, 3, "steps 0 to 2: equal"),
        ("heat-0", 3, 1, "step 3: 2 differ"),
        ("heat-1", 4, 1, "step 4: 3 differ"),
        ("heat-4", 9, 1, "step 9: 100 differ"),
        ("same", 10, 1, "step 10: equal"),
    ]
    assert heat.draw_row(row_of([])) == ""
    assert HeatMap([row_of([], [0])]).shades == [(4, 1, 1)]


def test_what_one_run_alone_has_is_a_cell_too():
    line = StepHistogram()
    for step, differing, alone in [(0, 0, 0), (1, 0, 0), (2, 0, 3), (3, 2, 1)]:
        line.add(step, differing, alone)
    assert cells_of(HeatMap([line]).draw_row(line)) == [
        ("same", 0, 2, "steps 0 to 1: equal"),
        ("alone", 2, 1, "step 2: in one run only"),
        ("heat-4", 3, 1, "step 3: 2 differ"),
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
    axis = [node.text for node in parse(heat.draw_axis({0: 2})).iter("text")]
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
