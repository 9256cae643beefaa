"""The heat map of ``d9m report``: one row of cells for each module, one column for each step.

Drawings hold numbers and no names of a ledger: the page shows the names beside the rows.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby

from lightning_d9m.comparison.timeline import StepHistogram
from lightning_d9m.output.svg.elements import Scale, element
from lightning_d9m.output.svg.timeline import draw_axis

_MOST_COLUMNS, _MOST_SHADES = 64, 5
_AXIS_WIDTH, _AXIS_HEIGHT = 480, 44
_EQUAL = "same"


@dataclass(frozen=True)
class HeatMapRow:
    """The digests of a row.

    Attributes:
        differing: The number of differences by step.
        recorded: The steps at which the digests of the row were compared.
    """

    differing: StepHistogram
    recorded: tuple[StepHistogram, ...]


class HeatMap:
    """The columns and shades that all rows have in common.

    A column is one step, or as many as a power of two if there are too many. The shade of a cell
    grows with the logarithm of the number of digests that differ in it.

    Args:
        rows: All rows; at least one has a recorded step.

    Attributes:
        shades: (number, fewest and most differing digests) of each shade, the palest first.
    """

    def __init__(self, rows: Iterable[HeatMapRow]) -> None:
        rows = list(rows)
        parts = [part for row in rows for part in (row.differing, *row.recorded)]
        steps = [step for part in parts for step in part.ordered()]
        self._last = max(step.last for step in steps)
        first = min(step.first for step in steps)
        width = max(part.width for part in parts)
        while self._last // width - first // width >= _MOST_COLUMNS:
            width *= 2
        self._width, self._start = width, first // width
        self._columns = self._last // width - self._start + 1
        counts = (count for row in rows for count in self._count(row.differing).values())
        most = max(1, *counts, 1)
        edges = sorted({round(most ** (n / _MOST_SHADES)) for n in range(_MOST_SHADES)})
        self._edges, limits = edges, [*edges[1:], most + 1]
        # The darkest is the last, however many there are.
        self._palest = _MOST_SHADES - len(edges)
        self.shades = [
            (number, low, limit - 1)
            for number, (low, limit) in enumerate(zip(edges, limits, strict=True), self._palest)
        ]

    def draw_axis(self, epochs: Mapping[int, int]) -> str:
        """Draw the steps and epochs of the columns, as wide as a row."""
        low = self._start * self._width
        scale = Scale(low, low + self._columns * self._width, 0, _AXIS_WIDTH)
        axis = draw_axis(scale, epochs, 1, self._last)
        return element("svg", axis, viewBox=f"0 0 {_AXIS_WIDTH} {_AXIS_HEIGHT}", aria_hidden="true")

    def draw_row(self, row: HeatMapRow) -> str:
        """Draw the cells of a row; neighbors of one shade are one rectangle."""
        counts = self._count(row.differing)
        recorded = {column for part in row.recorded for column in self._count(part)}

        def shade(column: int) -> str:
            if counts[column]:
                return f"heat-{self._shade(counts[column])}"
            return _EQUAL if column in recorded else ""

        cells = []
        for kind, group in groupby(range(self._columns), shade):
            columns = list(group)
            if kind:
                count = sum(counts[column] for column in columns)
                cells.append(self._draw_cell(kind, columns, count))
        # The page stretches the row.
        shape = {"viewBox": f"0 0 {self._columns} 1", "preserveAspectRatio": "none"}
        return element("svg", *cells, **shape) if cells else ""

    def _draw_cell(self, kind: str, columns: list[int], count: int) -> str:
        first = (self._start + columns[0]) * self._width
        last = min((self._start + columns[-1] + 1) * self._width - 1, self._last)
        steps = f"step {first:,}" if first == last else f"steps {first:,} to {last:,}"
        words = f"{count:,} differ" if count else "equal"
        title = element("title", f"{steps}: {words}")
        return element("rect", title, class_=kind, x=columns[0], width=len(columns), height=1)

    def _count(self, part: StepHistogram) -> Counter[int]:
        """Return the differences in each column, with a zero for a column without."""
        counts: Counter[int] = Counter()
        for step in part.ordered():
            counts[step.first // self._width - self._start] += step.differing
        return counts

    def _shade(self, count: int) -> int:
        return self._palest + bisect_right(self._edges, count) - 1
