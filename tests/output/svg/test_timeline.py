"""The drawings of a report show what was measured, and nothing between."""

from xml.etree import ElementTree as ET

import pytest

from lightning_d9m.comparison.timeline import StepHistogram
from lightning_d9m.output.svg.timeline import draw_growth, draw_timeline


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
