"""Drawings as SVG: charts of values by step, and the rows of heat maps.

They hold numbers and no names of a ledger: the page shows the names beside them, and has a color
for each class and line.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from itertools import groupby
from typing import TypeAlias

from lightning_d9m.comparison.timeline import StepTable

COLORS = ("#c0392b", "#2471a3", "#1e8449", "#b9770e", "#6c3483", "#515a5a")
WIDTH, HEIGHT = 720, 228
LEFT, _RIGHT = 8, 712
_TOP, _BOTTOM = 34, 172
_DARKEST = 4
_WORDS = {"same": "equal", "alone": "in one run only"}
# (step, value), in order of the steps.
Points: TypeAlias = Sequence[tuple[int, float]]


def draw_chart(
    label: str, lines: Sequence[Points], *, log: bool = False, name: str = "line"
) -> str:
    """Draw the values of several lines by step, with the least and the greatest of both.

    A line ends where a value is NaN or infinite.

    Args:
        label: What is drawn, for a reader that does not see it.
        lines: The values of each line.
        log: Whether the scale is logarithmic; then no value is negative, and zero lies below all
            others. On a linear one the first line is the reference, and the widest.
        name: What a line is, for the titles of its dots.
    """
    finite = sorted(value for own in lines for _, value in own if math.isfinite(value)) or [0.0]
    least = math.log10(next((value for value in finite if value > 0), 1.0)) if log else 0.0

    def scale(value: float) -> float:
        return value if not log else math.log10(value) if value > 0 else least - 1

    up = _make_scale(scale(finite[0]), scale(finite[-1]), _BOTTOM, _TOP)
    steps = [step for own in lines for step, _ in own] or [0]
    across = _make_scale(min(steps), max(steps), LEFT, _RIGHT)
    low, high = describe_limits(finite[0], finite[-1])
    parts = [
        f'<path class="axis" d="M{LEFT - 4},{_TOP}V{_BOTTOM + 4}H{_RIGHT}" fill="none"/>',
        f'<text x="0" y="20">{high}</text><text x="0" y="198">{low}</text>',
        f'<text x="0" y="222">step {min(steps):,}</text>',
        f'<text x="{_RIGHT}" y="222" text-anchor="end">{max(steps):,}</text>',
    ]
    for number, own in enumerate(lines):
        wide = not (number or log)
        color, dashes = _choose_style(number)
        width = f";stroke-width:{4 if wide else 1.5};opacity:{0.45 if wide else 1}"
        for is_drawn, group in groupby(own, key=lambda point: math.isfinite(point[1])):
            points = [(across(step), up(scale(value)), step, value) for step, value in group]
            if not is_drawn:
                continue
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y, *_ in points)
            style = f"fill:none;stroke:{color}{dashes}{width}"
            parts.append(f'<polyline points="{path}" style="{style}"/>')
            for x, y, step, value in points:
                shown = f"{value:.2g}" if log else repr(value)
                title = f"{name} {number + 1}, step {step:,}: {shown}"
                place = f'cx="{x:.1f}" cy="{y:.1f}" r="{3.5 if wide else 2}"'
                parts.append(
                    f'<circle {place} style="fill:{color}"><title>{title}</title></circle>'
                )
    # The style of a page has other sizes.
    size = f'viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
    return f'<svg {size} role="img" aria-label="{escape(label)}">{"".join(parts)}</svg>'


def _make_scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    """Return the function from values to pixels; equal limits lie in the middle."""
    size = high - low
    return lambda value: start + (end - start) * ((value - low) / size if size else 0.5)


def describe_limits(low: float, high: float) -> list[str]:
    """Return two numbers in as few digits as tell them apart, at least three.

    >>> describe_limits(0.5, 0.7874), describe_limits(2.2463, 2.2461), describe_limits(1, 1)
    (['0.5', '0.787'], ['2.2463', '2.2461'], ['1', '1'])
    """
    forms = ([f"{value:.{digits}g}" for value in (low, high)] for digits in range(3, 18))
    return next(shown for shown in forms if low == high or shown[0] != shown[1])


def draw_key(number: int) -> str:
    """Draw a piece of a line of ``draw_chart``, for its legend."""
    color, dashes = _choose_style(number)
    piece = f'<path d="M0,5H24" style="stroke:{color};stroke-width:3{dashes}"/>'
    return f'<svg viewBox="0 0 24 10" width="24" height="10" class="key-line">{piece}</svg>'


def _choose_style(number: int) -> tuple[str, str]:
    """Return the color of a line, and its dashes once the colors are used up."""
    dashed = ";stroke-dasharray:6 3" if number // len(COLORS) % 2 else ""
    # The page has other colors for a dark background.
    name = number % len(COLORS)
    return f"var(--line-{name},{COLORS[name]})", dashed


def draw_row(cells: Mapping[int, Sequence[int]], table: StepTable, most: int) -> str:
    """Draw the cells of a row of a table; neighbors of one shade are one rectangle.

    The shade grows with the logarithm of the number of digests that differ, up to ``most``.
    """

    def choose_class(column: int) -> str:
        if column not in cells:
            return ""
        differing, alone = cells[column]
        if not differing:
            return "alone" if alone else "same"
        return f"heat-{round(_DARKEST * math.log(differing) / math.log(most)) if most > 1 else 4}"

    parts = []
    for kind, group in groupby(table.columns, choose_class):
        columns = list(group)
        if not kind:
            continue
        count = sum(cells[column][0] for column in columns)
        first = max(columns[0] * table.width, table.first)
        last = min((columns[-1] + 1) * table.width - 1, table.last)
        steps = f"step {first:,}" if first == last else f"steps {first:,} to {last:,}"
        title = f"<title>{steps}: {f'{count:,} differ' if count else _WORDS[kind]}</title>"
        place = f'x="{columns[0] - table.columns[0]}" width="{len(columns)}" height="1"'
        parts.append(f'<rect class="{kind}" {place}>{title}</rect>')
    # The page stretches the row.
    shape = f'viewBox="0 0 {len(table.columns)} 1" preserveAspectRatio="none"'
    return f"<svg {shape}>{''.join(parts)}</svg>" if parts else ""
