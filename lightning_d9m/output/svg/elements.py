"""Scales, ticks and elements that all drawings share; a browser shows them without a library."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

COLORS = ("#c0392b", "#2471a3", "#1e8449", "#b9770e", "#6c3483", "#515a5a")


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


def polyline(points: Iterable[tuple[float, float]], **attributes: object) -> str:
    """Return a line through points."""
    return element("polyline", points=" ".join(f"{x:.1f},{y:.1f}" for x, y in points), **attributes)


@dataclass(frozen=True)
class Scale:
    """A linear scale from values to pixels.

    Attributes:
        low: The value at ``start``.
        high: The value at ``end``, different from ``low``.
        start: The pixel of ``low``.
        end: The pixel of ``high``.
    """

    low: float
    high: float
    start: float
    end: float

    def at(self, value: float) -> float:
        """Return the pixel of a value."""
        return self.start + (self._share(value)) * (self.end - self.start)

    def _share(self, value: float) -> float:
        return (value - self.low) / (self.high - self.low)


class LogScale(Scale):
    """A logarithmic scale; ``low`` and ``high`` are powers of ten.

    Values beyond the powers, zero among them, lie at their end of the scale.
    """

    def _share(self, value: float) -> float:
        if value <= 0:
            return 0.0
        share = (math.log10(value) - self.low) / (self.high - self.low)
        return min(max(share, 0.0), 1.0)

    @property
    def powers(self) -> range:
        """The powers of ten on the scale."""
        return range(int(self.low), int(self.high) + 1)


def find_powers(values: Sequence[float]) -> tuple[int, int]:
    """Return the closest two powers of ten that all positive values lie between.

    >>> find_powers([0.03, 20.0, 0.0])
    (-2, 2)
    """
    logs = [math.log10(value) for value in values if value > 0 and math.isfinite(value)] or [0.0]
    low, high = math.floor(min(logs)), math.ceil(max(logs))
    return low, max(high, low + 1)


def round_axis(value: float) -> float:
    """Return the least of 1, 2 or 5 times a power of ten that is not below a positive value.

    >>> round_axis(0.7), round_axis(0.0013), round_axis(50.0)
    (1.0, 0.002, 50.0)
    """
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= value)
