"""The plots are well-formed SVG and put values where they belong."""

import re
from xml.etree import ElementTree as ET

import pytest

from lightning_d9m.output.svg.charts import draw_dots, draw_lines
from lightning_d9m.output.svg.elements import LogScale, find_powers, round_axis

SVG = "{http://www.w3.org/2000/svg}"


def circles(text, colour):
    root = ET.fromstring(text)  # noqa: S314 - our own
    return [
        (float(dot.get("cx")), float(dot.get("cy")))
        for dot in root.iter(f"{SVG}circle")
        if dot.get("fill") == colour
    ][1:]  # the first one is the legend's


def test_the_axis_holds_all_values_between_powers_of_ten():
    assert find_powers([0.03, 20.0, 0.0]) == (-2, 2)
    scale = LogScale(-2, 2, start=0, end=1)
    assert scale.at(0.01) == 0
    assert scale.at(1.0) == pytest.approx(0.5)
    assert scale.at(1000.0) == 1
    assert scale.at(0.0) == 0
    low, high = find_powers([])
    assert high > low


@pytest.mark.parametrize("value", [1e-9, 0.0013, 0.2, 0.5, 0.51, 1.0, 3.0, 7e5])
def test_an_axis_ends_at_a_round_number(value):
    end = round_axis(value)
    assert value <= end <= 2.5 * value
    assert f"{end:.0e}"[0] in "125"
    assert float(f"{end:.0e}") == pytest.approx(end)


def test_epochs_are_counted_from_0_unless_said_otherwise():
    series = {"grows": [0.1, 0.2, 0.3]}
    for options, expected in (({}, ["0", "1", "2"]), ({"first": 1}, ["1", "2", "3"])):
        root = ET.fromstring(draw_lines("t", ("x", "y"), series, **options))  # noqa: S314 - our own
        labels = [node.text for node in root.iter(f"{SVG}text")]
        assert [label for label in labels if label.isdecimal()] == expected


def test_dots_lie_by_their_values_one_line_below_the_other():
    text = draw_dots("A & B", "time", [("one", {"ours": 1.0}), ("two", {"ours": 10.0})], ["ours"])
    (first, second) = circles(text, "#c0392b")
    assert second[0] > first[0]
    assert second[1] > first[1]


def test_a_kind_without_a_value_has_no_dot():
    text = draw_dots("t", "c", [("one", {"b": 1.0})], ["a", "b"])
    assert len(circles(text, "#c0392b")) == 0
    assert len(circles(text, "#2471a3")) == 1


def test_lines_rise_with_their_values_and_zero_lies_below_all_of_them():
    text = draw_lines("t", ("epoch", "Vc"), {"grows": [0.001, 0.01, 0.1], "none": [0.0] * 3})
    grows, none = circles(text, "#c0392b"), circles(text, "#2471a3")
    heights = [y for _, y in grows]
    assert heights == sorted(heights, reverse=True)
    [floor] = {y for _, y in none}
    assert floor > max(heights)
    assert f'y="{floor + 4:.1f}" text-anchor="end">0</text>' in text


def test_a_long_legend_is_broken_and_nothing_leaves_the_frame():
    names = {f"a rather long name of a series {number}": [1.0] for number in range(4)}
    text = draw_lines("t", ("x", "y"), names)
    root = ET.fromstring(text)  # noqa: S314 - our own
    width, height = float(root.get("width")), float(root.get("height"))
    for item in root.iter():
        x, y = (item.get(key) or item.get(f"c{key}") for key in "xy")
        if x is not None and re.fullmatch(r"[\d.]+", x):
            assert float(x) <= width
            assert float(y) <= height
    assert len({dot.get("cy") for dot in root.iter(f"{SVG}circle")}) > 2
