"""Drawings of logged values for the report; they hold numbers and no names of a ledger."""

import math
from collections.abc import Mapping, Sequence
from itertools import groupby

from lightning_d9m.output.svg.elements import (
    COLORS,
    LogScale,
    Scale,
    element,
    find_powers,
    line,
    polyline,
)
from lightning_d9m.output.svg.timeline import (
    LEFT,
    draw_axis,
    draw_dot,
    draw_tick,
    frame,
    scale_steps,
)

_BOTTOM, _TOP, _HEIGHT = 172, 14, 216
_MAX_TICKS = 6
_FEWEST_DIGITS, _MOST_DIGITS = 3, 7

# (step, value), in order of the steps.
Points = Sequence[tuple[int, float]]


def draw_values(label: str, runs: Sequence[Points], epochs: Mapping[int, int]) -> str:
    """Draw the values of several runs over each other; the reference is the widest line.

    Args:
        label: What is drawn, for a reader that does not see it.
        runs: The values of each run, the reference first. NaN and infinities are left out.
        epochs: The first step of each epoch.
    """
    finite = [[(step, value) for step, value in run if math.isfinite(value)] for run in runs]
    values = [value for run in finite for _, value in run] or [0.0]
    low, high = min(values), max(values)
    margin = (high - low) / 20 or abs(high) / 20 or 1.0
    up = Scale(low - margin, high + margin, _BOTTOM, _TOP)
    across = scale_steps(step for run in finite for step, _ in run)
    parts = [line(LEFT, _TOP, LEFT, _BOTTOM, class_="axis")]
    ticks = list(dict.fromkeys((low, (low + high) / 2, high)))
    for value, name in zip(ticks, _describe_ticks(ticks), strict=True):
        parts += draw_tick(up.at(value), name)
    for number, run in enumerate(finite):
        points = [(across.at(step), up.at(value)) for step, value in run]
        color, dashes = _choose_style(number)
        width = 1.5 if number else 4
        style = (
            f"fill:none;stroke:{color}{dashes};stroke-width:{width};opacity:{1 if number else 0.45}"
        )
        parts.append(polyline(points, style=style))
        parts += [
            draw_dot(
                *point, 2.0 if number else 3.5, f"run {number + 1}, step {step:,}: {value!r}", color
            )
            for (step, value), point in zip(run, points, strict=True)
        ]
    parts.append(draw_axis(across, epochs, _BOTTOM))
    return frame(label, _HEIGHT, parts)


def draw_gaps(label: str, gaps: Points, epochs: Mapping[int, int]) -> str:
    """Draw the size of a difference by step, on a logarithmic scale; at least one is positive.

    A step without a difference has no dot.
    """
    positive = [(step, gap) for step, gap in gaps if gap > 0 and math.isfinite(gap)]
    low, high = find_powers([gap for _, gap in positive])
    up = LogScale(low, high, _BOTTOM, _TOP)
    across = scale_steps(step for step, _ in gaps)
    parts = _draw_powers(up)
    for step, gap in positive:
        parts.append(draw_dot(across.at(step), up.at(gap), 3.0, f"step {step:,}: {gap:.3g}"))
    parts.append(draw_axis(across, epochs, _BOTTOM))
    return frame(label, _HEIGHT, parts)


def draw_distances(label: str, lines: Sequence[Points], epochs: Mapping[int, int]) -> str:
    """Draw positive values of several lines by step, on a logarithmic scale.

    Args:
        label: What is drawn, for a reader that does not see it.
        lines: The values of each line. Zeros, NaN and infinities are left out, and so is the line
            on both sides of them.
        epochs: The first step of each epoch.
    """
    positive = [value for run in lines for _, value in run if 0 < value < math.inf]
    up = LogScale(*find_powers(positive), _BOTTOM, _TOP)
    across = scale_steps(step for run in lines for step, _ in run)
    parts = _draw_powers(up)
    for number, run in enumerate(lines):
        color, dashes = _choose_style(number)
        for is_drawn, group in groupby(run, key=lambda point: 0 < point[1] < math.inf):
            if not is_drawn:
                continue
            drawn = list(group)
            points = [(across.at(step), up.at(value)) for step, value in drawn]
            parts.append(polyline(points, style=f"stroke:{color}{dashes}"))
            parts += [
                draw_dot(*point, 2.5, f"line {number + 1}, step {step:,}: {value:.2g}", color)
                for (step, value), point in zip(drawn, points, strict=True)
            ]
    parts.append(draw_axis(across, epochs, _BOTTOM))
    return frame(label, _HEIGHT, parts)


def draw_key(number: int) -> str:
    """Draw a piece of a line of ``draw_values`` or ``draw_distances``, for its legend."""
    color, dashes = _choose_style(number)
    style = f"stroke:{color};stroke-width:3{dashes}"
    return element("svg", line(0, 5, 24, 5, style=style), viewBox="0 0 24 10", class_="key-line")


def _choose_style(number: int) -> tuple[str, str]:
    """Return the color of a line, and its dashes once the colors are used up."""
    dashed = ";stroke-dasharray:6 3" if number // len(COLORS) % 2 else ""
    # The page has other colors for a dark background.
    name = number % len(COLORS)
    return f"var(--line-{name},{COLORS[name]})", dashed


def _describe_ticks(values: Sequence[float]) -> list[str]:
    """Return different numbers in as few characters as tell them apart.

    >>> _describe_ticks([0.7874, 0.009563, -12345.0]), _describe_ticks([2.2463, 2.2527])
    (['0.787', '9.6e-3', '-1.2e4'], ['2.246', '2.253'])
    """
    texts = []
    for digits in range(_FEWEST_DIGITS, _MOST_DIGITS + 1):
        texts = [_describe_tick(value, digits) for value in values]
        if len(set(texts)) == len(texts):
            break
    return texts


def _describe_tick(value: float, digits: int) -> str:
    text = f"{value:.{digits}g}"
    if len(text) <= digits + 3 and "e" not in text:
        return text
    mantissa, _, power = f"{value:.{digits - 2}e}".partition("e")
    return f"{mantissa}e{int(power)}"


def _draw_powers(up: LogScale) -> list[str]:
    """Draw the axis of a logarithmic scale."""
    parts = [line(LEFT, _TOP, LEFT, _BOTTOM, class_="axis")]
    for power in up.powers[:: -(-len(up.powers) // _MAX_TICKS)]:
        parts += draw_tick(up.at(10.0**power), f"1e{power}")
    return parts
