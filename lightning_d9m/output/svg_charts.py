"""Plots as SVG, written by hand: a browser shows them, and nothing need be installed."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

COLOURS = ("#c0392b", "#2471a3", "#1e8449", "#b9770e", "#6c3483", "#515a5a")
_FONT = 'font-family="sans-serif" font-size="12"'


@dataclass(frozen=True)
class Axis:
    """A logarithmic axis.

    Attributes:
        low: A power of ten that lies at the axis's beginning.
        high: One that lies at its end, greater than ``low``.
    """

    low: int
    high: int

    def place(self, value: float) -> float:
        """Return where a value lies, from 0 to 1; zero lies at the beginning."""
        if value <= 0:
            return 0.0
        share = (math.log10(value) - self.low) / (self.high - self.low)
        return min(max(share, 0.0), 1.0)


def fit_axis(values: Sequence[float]) -> Axis:
    """Return the axis that holds all positive values between whole powers of ten."""
    logs = [math.log10(value) for value in values if value > 0 and math.isfinite(value)] or [0.0]
    low, high = math.floor(min(logs)), math.ceil(max(logs))
    return Axis(low, max(high, low + 1))


def draw_dots(
    title: str, caption: str, rows: Sequence[tuple[str, Mapping[str, float]]], kinds: Sequence[str]
) -> str:
    """Draw one line for each row, with a dot for each kind that it has a value of.

    Args:
        title: Above the plot.
        caption: Below the axis: what a value is.
        rows: Label, and value by kind.
        kinds: In the order of their colours.
    """
    left, width, step = 330, 420, 18
    legend, top = _legend(kinds, left, left + width)
    height = top + step * len(rows) + 48
    axis = fit_axis([value for _, values in rows for value in values.values()])
    parts = [legend]
    parts += _vertical(axis, left, width, top, height - 48)
    for number, (label, values) in enumerate(rows):
        y = top + step * number + step // 2
        parts.append(f'<text x="{left - 8}" y="{y + 4}" text-anchor="end">{escape(label)}</text>')
        parts.append(f'<line x1="{left}" y1="{y}" x2="{left + width}" y2="{y}" stroke="#eee"/>')
        for kind, colour in zip(kinds, COLOURS, strict=False):
            if kind in values:
                x = left + width * axis.place(values[kind])
                parts.append(f'<circle cx="{x:.1f}" cy="{y}" r="4" fill="{colour}"/>')
    parts.append(
        f'<text x="{left + width / 2}" y="{height - 8}" text-anchor="middle">{escape(caption)}'
        "</text>"
    )
    return _frame(title, left + width + 30, height, parts)


def draw_lines(title: str, captions: tuple[str, str], series: Mapping[str, Sequence[float]]) -> str:
    """Draw lines over whole numbers from 1, on a logarithmic axis; zero has a floor of its own.

    Args:
        title: Above the plot.
        captions: What lies along, and what upwards.
        series: Values by name, all beginning at 1.
    """
    left, width, height = 80, 560, 300
    legend, top = _legend(list(series), left, left + width)
    listed = [value for values in series.values() for value in values]
    axis, zero = fit_axis(listed), None
    if min(listed, default=1.0) <= 0:
        axis, zero = Axis(axis.low - 1, axis.high), axis.low - 1
    most = max((len(values) for values in series.values()), default=1)
    parts = [legend]
    for power in range(axis.low, axis.high + 1):
        y = top + height * (1 - axis.place(10.0**power))
        name = "0" if power == zero else f"1e{power}"
        parts.append(
            f'<line x1="{left}" y1="{y:.1f}" x2="{left + width}" y2="{y:.1f}" stroke="#ddd"/>'
        )
        parts.append(f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{name}</text>')
    for number in _ticks(most):
        x = left + width * _share(number - 1, most)
        parts.append(
            f'<text x="{x:.1f}" y="{top + height + 18}" text-anchor="middle">{number}</text>'
        )
    for (_, values), colour in zip(series.items(), COLOURS * 8, strict=False):
        points = [
            (left + width * _share(number, most), top + height * (1 - axis.place(value)))
            for number, value in enumerate(values)
        ]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in points]
    along, upwards = (escape(caption) for caption in captions)
    middle = left + width / 2
    parts.append(f'<text x="{middle}" y="{top + height + 40}" text-anchor="middle">{along}</text>')
    parts.append(
        f'<text x="18" y="{top + height / 2}" text-anchor="middle" transform="rotate(-90 18 '
        f'{top + height / 2})">{upwards}</text>'
    )
    return _frame(title, left + width + 30, top + height + 52, parts)


def _share(number: int, most: int) -> float:
    return number / max(most - 1, 1)


def _ticks(most: int) -> range:
    return range(1, most + 1, max(1, most // 10))


def _vertical(axis: Axis, left: int, width: int, top: int, bottom: int) -> list[str]:
    parts = []
    for power in range(axis.low, axis.high + 1):
        x = left + width * axis.place(10.0**power)
        parts.append(f'<line x1="{x:.1f}" y1="{top}" x2="{x:.1f}" y2="{bottom}" stroke="#bbb"/>')
        parts.append(
            f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{10.0**power:g}</text>'
        )
    return parts


def _legend(names: Sequence[str], left: int, right: int) -> tuple[str, int]:
    """Return the legend, and where what is below it may begin."""
    parts, x, y = [], left, 40
    for name, colour in zip(names, COLOURS * 8, strict=False):
        width = 24 + 7 * len(name)
        if x > left and x + width > right:
            x, y = left, y + 18
        parts.append(f'<circle cx="{x}" cy="{y}" r="4" fill="{colour}"/>')
        parts.append(f'<text x="{x + 8}" y="{y + 4}">{escape(name)}</text>')
        x += width
    return "".join(parts), y + 24


def _frame(title: str, width: int, height: int, parts: Sequence[str]) -> str:
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" {_FONT}>\n'
        f'<rect width="100%" height="100%" fill="white"/>\n'
        f'<text x="16" y="22" font-size="15">{escape(title)}</text>\n{body}\n</svg>\n'
    )
