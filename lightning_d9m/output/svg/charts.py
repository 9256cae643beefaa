"""Charts of the audits as standalone SVG files."""

from collections.abc import Mapping, Sequence
from itertools import cycle

from lightning_d9m.output.svg.elements import (
    COLORS,
    LogScale,
    element,
    find_powers,
    line,
    polyline,
    text,
)


def draw_dots(
    title: str, caption: str, rows: Sequence[tuple[str, Mapping[str, float]]], kinds: Sequence[str]
) -> str:
    """Draw one line for each row, with a dot for each kind that it has a value of.

    Args:
        title: The title above the plot.
        caption: The meaning of the values, below the axis.
        rows: Label, and value by kind.
        kinds: The kinds in the order of their colors.
    """
    left, width, step = 330, 420, 18
    legend, top = _draw_legend(kinds, left, left + width)
    bottom = top + step * len(rows)
    powers = find_powers([value for _, values in rows for value in values.values()])
    scale = LogScale(*powers, left, left + width)
    parts = [legend]
    for power in scale.powers:
        x = scale.at(10.0**power)
        parts.append(line(x, top, x, bottom, stroke="#bbb"))
        parts.append(text(x, bottom + 16, f"{10.0**power:g}", "middle"))
    for number, (label, values) in enumerate(rows):
        y = top + step * number + step // 2
        parts.append(text(left - 8, y + 4, label, "end"))
        parts.append(line(left, y, left + width, y, stroke="#eee"))
        parts += [
            _draw_dot(scale.at(values[kind]), y, color, 4)
            for kind, color in zip(kinds, COLORS, strict=False)
            if kind in values
        ]
    parts.append(text(left + width / 2, bottom + 40, caption, "middle"))
    return _frame(title, left + width + 30, bottom + 48, parts)


def draw_lines(
    title: str, captions: tuple[str, str], series: Mapping[str, Sequence[float]], *, first: int = 0
) -> str:
    """Draw lines over successive whole numbers on a logarithmic axis, with zero below the others.

    Args:
        title: The title above the plot.
        captions: The meaning of the horizontal and of the vertical axis.
        series: Values by name, all of which begin at ``first``.
        first: The number of the first value.
    """
    left, width, height = 80, 560, 300
    legend, top = _draw_legend(list(series), left, left + width)
    values = [value for listed in series.values() for value in listed]
    low, high = find_powers(values)
    has_zero = min(values, default=1.0) <= 0
    scale = LogScale(low - has_zero, high, top + height, top)
    count = max(map(len, series.values()), default=1)
    columns = [left + width * number / max(count - 1, 1) for number in range(count)]
    parts = [legend]
    for power in scale.powers:
        y = scale.at(10.0**power)
        parts.append(line(left, y, left + width, y, stroke="#ddd"))
        parts.append(text(left - 8, y + 4, "0" if power < low else f"1e{power}", "end"))
    parts += [
        text(columns[number], top + height + 18, str(first + number), "middle")
        for number in range(0, count, max(1, count // 10))
    ]
    for listed, color in zip(series.values(), cycle(COLORS), strict=False):
        points = list(zip(columns, map(scale.at, listed), strict=False))
        parts.append(polyline(points, fill="none", stroke=color, stroke_width=2))
        parts += [_draw_dot(x, y, color, 3) for x, y in points]
    along, upwards = captions
    middle = top + height / 2
    parts.append(text(left + width / 2, top + height + 40, along, "middle"))
    parts.append(text(18, middle, upwards, "middle", transform=f"rotate(-90 18 {middle})"))
    return _frame(title, left + width + 30, top + height + 52, parts)


def _draw_dot(x: float, y: float, color: str, radius: int) -> str:
    return element("circle", cx=x, cy=y, r=radius, fill=color)


def _draw_legend(names: Sequence[str], left: int, right: int) -> tuple[str, int]:
    """Return the legend and the height at which it ends."""
    parts, x, y = [], left, 40
    for name, color in zip(names, cycle(COLORS), strict=False):
        width = 24 + 7 * len(name)
        if x > left and x + width > right:
            x, y = left, y + 18
        parts += [_draw_dot(x, y, color, 4), text(x + 8, y + 4, name)]
        x += width
    return "".join(parts), y + 24


def _frame(title: str, width: int, height: int, parts: Sequence[str]) -> str:
    return element(
        "svg",
        "\n",
        element("rect", width="100%", height="100%", fill="white"),
        text(16, 22, title, font_size=15),
        "\n".join(parts),
        xmlns="http://www.w3.org/2000/svg",
        width=width,
        height=height,
        viewBox=f"0 0 {width} {height}",
        font_family="sans-serif",
        font_size=12,
    )
