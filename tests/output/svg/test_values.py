"""Logged values and distances are drawn where they belong, with labels that fit."""

import math
import re
from xml.etree import ElementTree as ET

import pytest

from lightning_d9m.output.svg.timeline import LEFT
from lightning_d9m.output.svg.values import draw_distances, draw_key, draw_values

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
