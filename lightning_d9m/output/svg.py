"""Drawings as SVG: charts over the steps of runs, heat maps of ranks and modules.

They hold numbers and no names of a ledger: the page shows the names beside them, and has a color
for each class and line.
"""

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from typing import TypeAlias

from lightning_d9m.comparison.timeline import MAX_STEPS, StepHistogram

COLORS = ("#c0392b", "#2471a3", "#1e8449", "#b9770e", "#6c3483", "#515a5a")
LEFT, _RIGHT = 84, 708
WIDTH, HEIGHT = 720, 216
_TOP, _BOTTOM = 14, 172
_MAX_EPOCHS, _EPOCH_WIDTH = 8, 64
_MAX_TICKS = 6
_MOST_DIGITS = 7
_MOST_SHADES = 5
_AXIS_WIDTH, _AXIS_HEIGHT = 480, 44
_WORDS = {"same": "equal", "alone": "in one run only"}
# (step, value), in order of the steps.
Points: TypeAlias = Sequence[tuple[int, float]]


def element(tag: str, *content: str, **attributes: object) -> str:
    """Return an SVG element.

    Args:
        tag: Its name.
        content: Elements within it, already SVG.
        attributes: Its attributes, which are escaped; ``_`` stands for ``-``, and a trailing one
            is removed. Floats are rounded to a tenth.

    >>> element("circle", cx=1.25, cy=2, class_="a&b")
    '<circle cx="1.2" cy="2" class="a&amp;b"/>'
    """
    written = "".join(
        f' {name.rstrip("_").replace("_", "-")}="'
        f'{f"{value:.1f}" if isinstance(value, float) else escape(str(value))}"'
        for name, value in attributes.items()
    )
    return f"<{tag}{written}>{''.join(content)}</{tag}>" if content else f"<{tag}{written}/>"


def text(x: float, y: float, words: str, anchor: str = "start", **attributes: object) -> str:
    """Return a line of text; ``words`` are escaped."""
    return element("text", escape(words), x=x, y=y, text_anchor=anchor, **attributes)


def line(x1: float, y1: float, x2: float, y2: float, **attributes: object) -> str:
    """Return a straight line."""
    return element("line", x1=x1, y1=y1, x2=x2, y2=y2, **attributes)


@dataclass(frozen=True)
class Scale:
    """A scale from values to pixels, linear or logarithmic.

    Attributes:
        low: The value at ``start``; of a logarithmic scale its power of ten.
        high: The value at ``end``, likewise; different from ``low``.
        start: The pixel of ``low``.
        end: The pixel of ``high``.
        log: Whether it is logarithmic. Then zero lies at ``start``.
    """

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def at(self, value: float) -> float:
        """Return the pixel of a value."""
        if self.log:
            value = math.log10(value) if value > 0 else self.low
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


def scale_steps(steps: Iterable[int]) -> Scale:
    """Return the horizontal scale of a drawing over these steps."""
    numbers = [*steps] or [0]
    low, high = min(numbers), max(numbers)
    return Scale(low, max(high, low + 1), LEFT, _RIGHT)


def draw_axis(scale: Scale, epochs: Mapping[int, int], base: int, last: int | None = None) -> str:
    """Draw the axis of steps, with its first and last step and as many epochs as fit.

    The name of an epoch stands below its steps, between the ticks where it begins and ends: a
    record at the end of epoch 2 is at the tick between epochs 2 and 3.

    Args:
        scale: The scale.
        epochs: The first step of each epoch.
        base: The height of the axis.
        last: The last step; None for the end of the scale.
    """
    starts = sorted((step, epoch) for epoch, step in epochs.items())
    ends = [step for step, _ in starts[1:]] + [scale.high]
    shown = [
        (max(start, scale.low), min(end, scale.high), epoch)
        for (start, epoch), end in zip(starts, ends, strict=False)
        if start < scale.high and end > scale.low
    ]
    parts = [line(scale.start, base, scale.end, base, class_="axis")]
    free = scale.start
    for number, (start, end, epoch) in enumerate(shown[:: -(-len(shown) // _MAX_EPOCHS) or 1]):
        ticks = (scale.at(start), scale.at(end))
        parts += [line(x, base, x, base + 6, class_="axis") for x in ticks]
        half = _EPOCH_WIDTH / 2
        x = min(max(scale.at((start + end) / 2), scale.start + half), scale.end - half)
        if x - half >= free:
            # A narrow page shows every second one.
            kind = "odd" if number % 2 else "even"
            parts.append(text(x, base + 19, f"epoch {epoch:,}", "middle", class_=kind))
            free = x + half - 8
    parts.append(text(scale.start, base + 39, f"step {scale.low:,}"))
    parts.append(text(scale.end, base + 39, f"{scale.high if last is None else last:,}", "end"))
    return "".join(parts)


def draw_chart(
    label: str,
    lines: Sequence[Points],
    epochs: Mapping[int, int],
    *,
    log: bool = False,
    name: str = "line",
) -> str:
    """Draw the values of several lines by step.

    A line ends where a value is NaN or infinite. On a logarithmic scale zero lies below all others.

    Args:
        label: What is drawn, for a reader that does not see it.
        lines: The values of each line.
        epochs: The first step of each epoch.
        log: Whether the scale is logarithmic; then no value is negative. On a linear one the first
            line is the reference, and the widest.
        name: What a line is, for the titles of its dots.
    """
    up, ticks = _scale_values([value for own in lines for _, value in own], log=log)
    across = scale_steps(step for own in lines for step, _ in own)
    parts = [line(LEFT, _TOP, LEFT, _BOTTOM, class_="axis")]
    for value, words in ticks:
        y = up.at(value)
        parts.append(line(LEFT - 4, y, LEFT, y, class_="axis"))
        parts.append(text(LEFT - 7, y + 4, words, "end"))
    for number, own in enumerate(lines):
        wide = not (number or log)
        color, dashes = _choose_style(number)
        width = f";stroke-width:{4 if wide else 1.5};opacity:{0.45 if wide else 1}"
        for is_drawn, group in groupby(own, key=lambda point: math.isfinite(point[1])):
            points = [(across.at(step), up.at(value), step, value) for step, value in group]
            if not is_drawn:
                continue
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y, *_ in points)
            style = f"fill:none;stroke:{color}{dashes}{width}"
            parts.append(element("polyline", points=path, style=style))
            for x, y, step, value in points:
                shown = f"{value:.2g}" if log else repr(value)
                title = element("title", f"{name} {number + 1}, step {step:,}: {shown}")
                radius, style = 3.5 if wide else 2.0, f"fill:{color}"
                parts.append(element("circle", title, cx=x, cy=y, r=radius, style=style))
    parts.append(draw_axis(across, epochs, _BOTTOM))
    # The style of a page has other sizes.
    size = {"viewBox": f"0 0 {WIDTH} {HEIGHT}", "width": WIDTH, "height": HEIGHT}
    return element("svg", *parts, **size, role="img", aria_label=label)


def _scale_values(
    values: Sequence[float], *, log: bool
) -> tuple[Scale, Sequence[tuple[float, str]]]:
    """Return the vertical scale of values, and (value, label) of its ticks."""
    finite = [value for value in values if math.isfinite(value)]
    if not log:
        low, high = min(finite, default=0.0), max(finite, default=0.0)
        margin = (high - low) / 20 or abs(high) / 20 or 1.0
        marked = list(dict.fromkeys((low, (low + high) / 2, high)))
        scale = Scale(low - margin, high + margin, _BOTTOM, _TOP)
        return scale, list(zip(marked, _describe_ticks(marked), strict=True))
    powers = [math.log10(value) for value in finite if value > 0] or [0.0]
    least = math.floor(min(powers))
    most = max(math.ceil(max(powers)), least + 1)
    zero = [(0.0, "0")] if 0.0 in finite else []
    shown = range(least, most + 1, -(-(most - least + 1) // _MAX_TICKS))
    scale = Scale(least - len(zero), most, _BOTTOM, _TOP, log=True)
    return scale, [*zero, *((10.0**power, f"1e{power}") for power in shown)]


def _describe_ticks(values: Sequence[float]) -> list[str]:
    """Return different numbers in as few characters as tell them apart.

    >>> _describe_ticks([0.7874, 0.009563, -12345.0]), _describe_ticks([2.2463, 2.2527])
    (['0.787', '9.6e-3', '-1.2e4'], ['2.246', '2.253'])
    """

    def describe(value: float, digits: int) -> str:
        shown = f"{value:.{digits}g}"
        if len(shown) <= digits + 3 and "e" not in shown:
            return shown
        mantissa, _, power = f"{value:.{digits - 2}e}".partition("e")
        return f"{mantissa}e{int(power)}"

    forms = ([describe(v, digits) for v in values] for digits in range(3, _MOST_DIGITS))
    most = [describe(value, _MOST_DIGITS) for value in values]
    return next((texts for texts in forms if len(set(texts)) == len(texts)), most)


def draw_key(number: int) -> str:
    """Draw a piece of a line of ``draw_chart``, for its legend."""
    color, dashes = _choose_style(number)
    style = f"stroke:{color};stroke-width:3{dashes}"
    piece = line(0, 5, 24, 5, style=style)
    return element("svg", piece, viewBox="0 0 24 10", width=24, height=10, class_="key-line")


def _choose_style(number: int) -> tuple[str, str]:
    """Return the color of a line, and its dashes once the colors are used up."""
    dashed = ";stroke-dasharray:6 3" if number // len(COLORS) % 2 else ""
    # The page has other colors for a dark background.
    name = number % len(COLORS)
    return f"var(--line-{name},{COLORS[name]})", dashed


class HeatMap:
    """The columns and shades that all rows have in common.

    A column is one step, or as many as a power of two if there are too many. The shade of a cell
    grows with the logarithm of the number of digests that differ in it.

    Args:
        rows: The steps of each row, with the differences; at least one has a step.

    Attributes:
        shades: (number, fewest and most differing digests) of each shade, the palest first.
    """

    def __init__(self, rows: Sequence[StepHistogram]) -> None:
        steps = [step for row in rows for step in row.ordered()]
        first, self._last = min(s.first for s in steps), max(s.last for s in steps)
        width = max(row.width for row in rows)
        while self._last // width - first // width >= MAX_STEPS:
            width *= 2
        self._width, self._start = width, first // width
        self._columns = self._last // width - self._start + 1
        most = max(max(self._count(row).values(), default=1) for row in rows) or 1
        edges = sorted({round(most ** (n / _MOST_SHADES)) for n in range(_MOST_SHADES)})
        # The darkest is the last, however many there are.
        numbers = range(_MOST_SHADES - len(edges), _MOST_SHADES)
        limits = [*edges[1:], most + 1]
        self.shades = [
            (number, low, limit - 1)
            for number, low, limit in zip(numbers, edges, limits, strict=True)
        ]

    def draw_axis(self, epochs: Mapping[int, int]) -> str:
        """Draw the steps and epochs of the columns, as wide as a row."""
        low = self._start * self._width
        scale = Scale(low, low + self._columns * self._width, 0, _AXIS_WIDTH)
        axis = draw_axis(scale, epochs, 1, self._last)
        return element("svg", axis, viewBox=f"0 0 {_AXIS_WIDTH} {_AXIS_HEIGHT}", aria_hidden="true")

    def draw_row(self, row: StepHistogram) -> str:
        """Draw the cells of a row; neighbors of one shade are one rectangle."""
        counts = self._count(row)
        recorded = set(counts)
        alone = {self._find_column(s.first) for s in row.ordered() if s.alone}
        lows = [low for _, low, _ in self.shades]

        def shade(column: int) -> str:
            if counts[column]:
                return f"heat-{self.shades[bisect_right(lows, counts[column]) - 1][0]}"
            return "alone" if column in alone else "same" if column in recorded else ""

        cells = []
        for kind, group in groupby(range(self._columns), shade):
            columns = list(group)
            if not kind:
                continue
            count = sum(counts[column] for column in columns)
            first, end = ((self._start + n) * self._width for n in (columns[0], columns[-1] + 1))
            words = f"{count:,} differ" if count else _WORDS[kind]
            last = min(end - 1, self._last)
            steps = f"step {first:,}" if first == last else f"steps {first:,} to {last:,}"
            title = element("title", f"{steps}: {words}")
            place = {"x": columns[0], "width": len(columns), "height": 1}
            cells.append(element("rect", title, class_=kind, **place))
        # The page stretches the row.
        shape = {"viewBox": f"0 0 {self._columns} 1", "preserveAspectRatio": "none"}
        return element("svg", *cells, **shape) if cells else ""

    def _count(self, row: StepHistogram) -> Counter[int]:
        """Return the differences in each column, with a zero for a column without."""
        counts: Counter[int] = Counter()
        for step in row.ordered():
            counts[self._find_column(step.first)] += step.differing
        return counts

    def _find_column(self, step: int) -> int:
        return step // self._width - self._start
