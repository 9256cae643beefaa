"""The drawings of a report show what was measured, and nothing between."""

import math
import re
from xml.etree import ElementTree as ET

import pytest

from lightning_d9m.comparison.timeline import StepHistogram
from lightning_d9m.output.svg.timeline import (
    LEFT,
    draw_distances,
    draw_growth,
    draw_key,
    draw_timeline,
    draw_values,
)


def draw(*steps):
    """Return the drawn growth of (step, differing of 10)."""
    growth = StepHistogram()
    for step, differing in steps:
        growth.add(step, 10, differing)
    return ET.fromstring(draw_growth("growth", growth, {0: 0, 1: 9}))  # noqa: S314 - our own


def test_a_line_connects_successive_steps_only():
    root = draw((0, 0), (1, 1), (2, 2), (9, 3), (18, 4), (19, 5))
    lines = [line.get("points").split() for line in root.iter("polyline")]
    assert [len(points) for points in lines] == [3, 2]
    assert len(list(root.iter("circle"))) == 6
    assert not list(draw((9, 0), (18, 1), (27, 2)).iter("polyline"))


def test_each_dot_says_what_was_measured():
    titles = [node.find("title").text for node in draw((9, 0), (18, 1)).iter("circle")]
    assert titles == ["step 9: 0%", "step 18: 10%"]


@pytest.mark.parametrize(
    ("differing", "labels"), [(3, ["0%", "25%", "50%"]), (10, ["0%", "50%", "100%"])]
)
def test_the_axis_of_shares_is_round_and_the_values_lie_on_it(differing, labels):
    root = draw((0, 0), (1, differing))
    texts = {node.text: float(node.get("y")) - 4 for node in root.iter("text") if "%" in node.text}
    assert list(texts) == labels
    bottom, _, top = texts.values()
    low, high = [float(dot.get("cy")) for dot in root.iter("circle")]
    share = (low - high) / (bottom - top)
    assert low == bottom
    assert share == pytest.approx(differing / 10 / (float(labels[-1][:-1]) / 100), abs=1e-3)


def test_an_epoch_is_named_below_its_steps():
    """The record at its end is at the tick before the next epoch."""
    root = draw(*((step, 1) for step in range(28)))
    names = {node.text: float(node.get("x")) for node in root.iter("text")}
    dots = {dot[0].text.split(":")[0]: float(dot.get("cx")) for dot in root.iter("circle")}
    assert dots["step 0"] < names["epoch 0"] < dots["step 9"] < names["epoch 1"] < dots["step 27"]
    assert names["epoch 0"] == pytest.approx((dots["step 0"] + dots["step 9"]) / 2, abs=0.1)
    ticks = {float(node.get("x1")) for node in root.iter("line") if node.get("y2") == "178"}
    assert ticks == {dots["step 0"], dots["step 9"], dots["step 27"]}


def test_each_status_has_its_mark():
    line = StepHistogram()
    for step, differing, alone in [(0, 0, 0), (1, 0, 0), (2, 0, 3), (3, 2, 0)]:
        line.add(step, 5, differing, alone)
    root = ET.fromstring(draw_timeline({0: line}, {}))  # noqa: S314 - our own
    marks = {mark.get("class"): mark.find("title").text for mark in root.iter("rect")}
    assert marks == {
        "equal": "steps 0 to 1: equal",
        "alone": "step 2: in one run only",
        "different": "step 3: different",
    }


# Pixels of a digit on a phone, where text is largest: 22 pixels high.
DIGIT = 13
EPOCHS = {0: 0, 1: 10, 2: 20, 3: 30}


@pytest.mark.parametrize("scale", [0.00956, 0.7874, 3.0, 12345.0, 2e-7, 6e9, -0.5, 1e-300])
def test_labels_of_values_fit_beside_the_axis(scale):
    text = draw_values("loss", [[(10, scale), (20, 2 * scale)]], EPOCHS)
    drawing = ET.fromstring(text)  # noqa: S314 - our own
    labels = [own.text for own in drawing.iter("text") if own.get("text-anchor") == "end"][:-1]
    assert len(labels) == 3
    longest = 6 if scale > 1e-100 else 8
    for label in labels:
        assert len(label) <= longest
        assert DIGIT * 6 < LEFT
    assert [float(label) for label in labels] == pytest.approx(
        sorted([scale, 1.5 * scale, 2 * scale]), rel=0.06
    )


def test_distances_are_lines_that_end_where_nothing_is_known():
    """Zero, NaN and infinity have no place on a logarithmic axis; a line ends before them."""
    first = [(10, 0.0), (20, 1e-6), (30, 1e-5), (40, math.nan), (50, 1e-2)]
    second = [(10, 1e-4), (20, math.inf), (30, 1e-3)]
    text = draw_distances("sizes", [first, second], EPOCHS)
    drawing = ET.fromstring(text)  # noqa: S314 - our own
    dots = [(float(d.get("cx")), float(d.get("cy"))) for d in drawing.iter("circle")]
    assert len(dots) == 5
    titles = [title.text for title in drawing.iter("title")]
    assert titles[0] == "line 1, step 20: 1e-06"
    heights = [y for _, y in dots]
    assert heights[0] > heights[1] > heights[3] > heights[4] > heights[2]
    # From 1e-6 to 1e-2: each power is as high as the next.
    assert heights[0] - heights[1] == pytest.approx(heights[4] - heights[2], abs=0.2)
    lines = [own.get("points").split() for own in drawing.iter("polyline")]
    assert [len(points) for points in lines] == [2, 1, 1, 1]


def test_each_of_nine_lines_has_a_style_of_its_own_that_the_legend_repeats():
    drawing = draw_distances("sizes", [[(10, 1.0 + n)] for n in range(9)], EPOCHS)
    styles = re.findall(r'<polyline points="[^"]*" style="([^"]*)"', drawing)
    assert len(set(styles)) == 9
    for number, style in enumerate(styles):
        color = style.partition(";")[0]
        assert color in draw_key(number)
        assert ("dasharray" in style) == ("dasharray" in draw_key(number)) == (number >= 6)
