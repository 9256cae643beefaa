"""The drawings of the page that ``d9m report`` writes; they hold numbers alone, and no name."""

from collections.abc import Mapping, Sequence

from lightning_d9m.comparison.timeline import StepHistogram, TimelineStep

_WIDTH, _HEIGHT = 720, 200
_LEFT, _RIGHT, _BOTTOM = 64, 12, 28
_ROW, _NARROWEST = 20, 4
_LABELS, _DOTS = 8, 200


class _Axis:
    """The steps, from left to right, with the epochs that begin among them."""

    def __init__(self, low: int, high: int, epochs: Mapping[int, int]) -> None:
        self.low, self.high = low, max(high, low + 1)
        self._epochs = [
            (epoch, step) for epoch, step in sorted(epochs.items()) if low <= step < high
        ]

    def at(self, step: float) -> float:
        """Return how far to the right a step is."""
        width = _WIDTH - _LEFT - _RIGHT
        return round(_LEFT + (step - self.low) / (self.high - self.low) * width, 1)

    def draw(self, base: int) -> str:
        """Draw the line at the bottom, the first and the last step, and epochs as room allows."""
        every = -(-len(self._epochs) // _LABELS)
        ticks = "".join(
            f'<line class="axis" x1="{self.at(step)}" x2="{self.at(step)}" y1="{base}" '
            f'y2="{base + 5}"/><text x="{self.at(step)}" y="{base + 19}" text-anchor="'
            f'{"start" if number == 0 else "middle"}">epoch {epoch:,}</text>'
            for number, (epoch, step) in enumerate(self._epochs[:: every or 1])
        )
        return (
            f'<line class="axis" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{base}" y2="{base}"/>'
            f'{ticks}<text x="{_LEFT}" y="{base + 36}">step {self.low:,}</text>'
            f'<text x="{_WIDTH - _RIGHT}" y="{base + 36}" text-anchor="end">{self.high:,}</text>'
        )


def draw_timeline(ranks: Mapping[int, StepHistogram], epochs: Mapping[int, int]) -> str:
    """Draw a line for each rank: at which steps its records agree, differ, or have no counterpart.

    What differs is taller as well as of another colour.
    """
    lines = {rank: growth.ordered() for rank, growth in ranks.items()}
    found = [step for steps in lines.values() for step in steps]
    axis = _Axis(min(s.first for s in found), max(s.last for s in found), epochs)
    rows = []
    for number, (rank, steps) in enumerate(lines.items()):
        top = number * _ROW + 4
        rows.append(
            f'<text x="{_LEFT - 6}" y="{top + 13}" text-anchor="end">rank {rank}</text>'
            + "".join(_draw_marks(axis, steps, top))
        )
    base = len(lines) * _ROW + 8
    return (
        f'<svg viewBox="0 0 {_WIDTH} {base + 42}" role="img" aria-label="Timeline: the records of '
        f'each rank by step">{"".join(rows)}{axis.draw(base)}</svg>'
    )


def _status(step: TimelineStep) -> str:
    return "different" if step.differing else "alone" if step.alone else "equal"


def _draw_marks(axis: _Axis, steps: Sequence[TimelineStep], top: int) -> list[str]:
    """Draw one mark for neighbours of one status; those that differ last, on top of the others."""
    marks: list[tuple[str, int, int]] = []
    for step in steps:
        status = _status(step)
        if marks and marks[-1][0] == status and step.first <= marks[-1][2] + 1:
            marks[-1] = (status, marks[-1][1], step.last)
        else:
            marks.append((status, step.first, step.last))
    order = ("equal", "alone", "different")
    drawn = []
    for status, first, last in sorted(marks, key=lambda mark: order.index(mark[0])):
        left = min(axis.at(first), _WIDTH - _RIGHT - _NARROWEST)
        width = max(_NARROWEST, round(min(axis.at(last + 1), _WIDTH - _RIGHT) - left, 1))
        inset = {"equal": 5, "alone": 3, "different": 0}[status]
        words = {"alone": "in one run only"}.get(status, status)
        where = f"step {first:,}" if first == last else f"steps {first:,} to {last:,}"
        drawn.append(
            f'<rect class="{status}" x="{left}" y="{top + inset}" width="{width}" '
            f'height="{_ROW - 4 - 2 * inset}"><title>{where}: {words}</title></rect>'
        )
    return drawn


def draw_growth(title: str, growth: StepHistogram, epochs: Mapping[int, int]) -> str:
    """Draw the share that differs, by step; it does in one at least."""
    steps = [step for step in growth.ordered() if step.compared]
    axis = _Axis(steps[0].first, steps[-1].last, epochs)
    top = max(step.differing / step.compared for step in steps)
    base = _HEIGHT - _BOTTOM

    def up(share: float) -> float:
        return round(base - share / top * (base - 14), 1)

    points = [
        (axis.at((step.first + step.last) / 2), up(step.differing / step.compared))
        for step in steps
    ]
    line = " ".join(f"{x},{y}" for x, y in points)
    few = points if len(points) <= _DOTS else ()
    dots = "".join(f'<circle cx="{x}" cy="{y}" r="2.5"/>' for x, y in few)
    first = next(step.first for step in steps if step.differing)
    at = axis.at(first)
    side = "end" if at > 3 * _LEFT else "start"  # before it, the line is at the bottom
    mark = (
        f'<line class="mark" x1="{at}" x2="{at}" y1="8" y2="{base}"/><text x="'
        f'{at + (6 if side == "start" else -6)}" y="18" text-anchor="{side}">from step '
        f"{first:,}</text>"
    )
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT + 14}" role="img" aria-label="{title}">'
        f'<line class="axis" x1="{_LEFT}" x2="{_LEFT}" y1="8" y2="{base}"/>{mark}'
        f'<polyline points="{line}"/>{dots}'
        f'<text x="{_LEFT - 6}" y="{up(top) + 4}" text-anchor="end">{100 * top:.3g}%</text>'
        f'<text x="{_LEFT - 6}" y="{base + 4}" text-anchor="end">0</text>'
        f"{axis.draw(base)}</svg>"
    )
