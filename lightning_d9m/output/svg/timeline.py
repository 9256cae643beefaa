"""Drawings over the steps of runs, for ``d9m report``; they hold no names of a ledger."""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import TypeAlias

from lightning_d9m.comparison.timeline import StepHistogram, TimelineStep
from lightning_d9m.output.svg.elements import (
    COLORS,
    LogScale,
    Scale,
    element,
    find_powers,
    line,
    polyline,
    round_axis,
    text,
)

_WIDTH, _HEIGHT = 720, 216
LEFT, RIGHT = 84, 708
_BOTTOM, _TOP = 172, 14
_ROW, _MIN_MARK = 20, 4
_MAX_LABELS, _LABEL, _HALF_LABEL, _MAX_DOTS = 8, 56, 32, 200
_MAX_TICKS = 6
_FEWEST_DIGITS, _MOST_DIGITS = 3, 7
_INSETS = {"equal": 5, "alone": 3, "different": 0}  # the last is drawn on top of the others

# (step, value), in order of the steps.
Points: TypeAlias = Sequence[tuple[int, float]]


def scale_steps(steps: Iterable[int]) -> Scale:
    """Return the horizontal scale of a drawing over these steps."""
    numbers = [*steps] or [0]
    low, high = min(numbers), max(numbers)
    return Scale(low, max(high, low + 1), LEFT, RIGHT)


def draw_axis(scale: Scale, epochs: Mapping[int, int], base: int, last: int | None = None) -> str:
    """Draw the axis of steps, with its first and last step and as many epochs as fit.

    The last step is the end of the scale unless it is given. The name of an epoch stands below its
    steps, between the ticks where it begins and ends: a record at the end of epoch 2 is at the tick
    between epochs 2 and 3.
    """
    starts = sorted((step, epoch) for epoch, step in epochs.items())
    ends = [step for step, _ in starts[1:]] + [scale.high]
    shown = [
        (max(start, scale.low), min(end, scale.high), epoch)
        for (start, epoch), end in zip(starts, ends, strict=False)
        if start < scale.high and end > scale.low
    ]
    left, right = scale.start, scale.end
    before = -math.inf
    parts = [line(left, base, right, base, class_="axis")]
    for number, (start, end, epoch) in enumerate(shown[:: -(-len(shown) // _MAX_LABELS) or 1]):
        x = max(scale.at((start + end) / 2), left + _HALF_LABEL)
        parts += [
            line(scale.at(at), base, scale.at(at), base + 6, class_="axis") for at in (start, end)
        ]
        label, x = f"epoch {epoch:,}", min(x, right - _HALF_LABEL)
        if x - before < _LABEL:
            continue
        before = x
        # A narrow page shows every second one.
        parts.append(text(x, base + 19, label, "middle", class_="odd" if number % 2 else "even"))
    parts.append(text(left, base + 39, f"step {scale.low:,}"))
    parts.append(text(right, base + 39, f"{scale.high if last is None else last:,}", "end"))
    return "".join(parts)


def draw_tick(y: float, label: str) -> list[str]:
    """Draw a tick of the vertical axis, and its label."""
    return [line(LEFT - 4, y, LEFT, y, class_="axis"), text(LEFT - 7, y + 4, label, "end")]


def draw_dot(x: float, y: float, radius: float, title: str, color: str = "") -> str:
    """Draw a dot that shows its title to a pointer; the page colors it unless a color is given."""
    style = {"style": f"fill:{color}"} if color else {}
    return element("circle", element("title", title), cx=x, cy=y, r=radius, **style)


def frame(label: str, height: int, parts: Sequence[str]) -> str:
    """Return a whole drawing, with a label for a reader that does not see it."""
    return element("svg", *parts, viewBox=f"0 0 {_WIDTH} {height}", role="img", aria_label=label)


def draw_timeline(ranks: Mapping[int, StepHistogram], epochs: Mapping[int, int]) -> str:
    """Draw a line for each rank: the steps at which its records agree, differ, or are unmatched.

    Differences have another color and are also taller.
    """
    lines = {rank: histogram.ordered() for rank, histogram in ranks.items()}
    scale = scale_steps(n for steps in lines.values() for s in steps for n in (s.first, s.last))
    parts = []
    for number, (rank, steps) in enumerate(lines.items()):
        top = number * _ROW + 4
        parts.append(text(LEFT - 6, top + 13, f"rank {rank}", "end"))
        parts += _draw_marks(scale, steps, top)
    base = len(lines) * _ROW + 8
    parts.append(draw_axis(scale, epochs, base))
    return frame("Timeline: the records of each rank by step", base + 45, parts)


def _draw_marks(scale: Scale, steps: Sequence[TimelineStep], top: int) -> list[str]:
    """Draw one mark for successive steps of one status."""
    marks: list[tuple[str, int, int]] = []
    for step in steps:
        status = "different" if step.differing else "alone" if step.alone else "equal"
        if marks and marks[-1][0] == status and step.first <= marks[-1][2] + 1:
            marks[-1] = (status, marks[-1][1], step.last)
        else:
            marks.append((status, step.first, step.last))
    drawn = []
    for status, first, last in sorted(marks, key=lambda mark: list(_INSETS).index(mark[0])):
        left = min(scale.at(first), RIGHT - _MIN_MARK)
        inset = _INSETS[status]
        words = {"alone": "in one run only"}.get(status, status)
        steps_named = f"step {first:,}" if first == last else f"steps {first:,} to {last:,}"
        drawn.append(
            element(
                "rect",
                element("title", f"{steps_named}: {words}"),
                class_=status,
                x=left,
                y=top + inset,
                width=max(_MIN_MARK, min(scale.at(last + 1), RIGHT) - left),
                height=_ROW - 4 - 2 * inset,
            )
        )
    return drawn


def draw_growth(title: str, growth: StepHistogram, epochs: Mapping[int, int]) -> str:
    """Draw the share that differs, by step; at least one step must differ.

    A line connects successive steps only: nothing is drawn where no record is.
    """
    steps = [step for step in growth.ordered() if step.compared]
    shares = [step.differing / step.compared for step in steps]
    limit = round_axis(max(shares))
    across = scale_steps(number for step in steps for number in (step.first, step.last))
    up = Scale(0.0, limit, _BOTTOM, _TOP)
    start, share = next((s.first, p) for s, p in zip(steps, shares, strict=True) if s.differing)
    x = across.at(start)
    label = _TOP + 4 if share < limit / 2 else _BOTTOM - 8  # beside the line, not on the curve
    anchor, gap = ("end", -6) if x > 3 * LEFT else ("start", 6)
    parts = [
        line(LEFT, _TOP, LEFT, _BOTTOM, class_="axis"),
        line(x, _TOP - 6, x, _BOTTOM, class_="mark"),
        text(x + gap, label, f"from step {start:,}", anchor),
    ]
    for share in (0.0, limit / 2, limit):
        parts += draw_tick(up.at(share), f"{100 * share:.3g}%")
    parts.append(draw_axis(across, epochs, _BOTTOM))
    parts += _draw_curve(steps, shares, across, up)
    return frame(title, _HEIGHT, parts)


def _draw_curve(
    steps: Sequence[TimelineStep], shares: Sequence[float], across: Scale, up: Scale
) -> list[str]:
    """Draw a line through each series of successive steps, and a dot at each step if they fit."""
    lines: list[list[tuple[float, float]]] = []
    dots = []
    last = None
    for step, share in zip(steps, shares, strict=True):
        y = up.at(share)
        if last is None or step.first > last + 1:
            lines.append([])
        # Merged steps are one level: their own shares are not known.
        lines[-1] += [(across.at(number), y) for number in dict.fromkeys((step.first, step.last))]
        last = step.last
        if len(steps) <= _MAX_DOTS or step.first == last:
            title = f"step {step.first:,}: {100 * share:.3g}%"
            dots.append(draw_dot(across.at(step.first), y, 2.5, title))
    return [polyline(points) for points in lines if points[1:]] + dots


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
