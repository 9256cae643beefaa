"""The section of the report about the size of the difference of each layer, epoch by epoch."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_d9m.comparison.timeline import Timeline
from lightning_d9m.comparison.weight_distance import (
    OTHERS,
    RESOLUTION,
    STANDARD_ERROR,
    Distance,
    DistanceSeries,
)
from lightning_d9m.ledger.kinds import ROOT
from lightning_d9m.output.svg.timeline import draw_distances, draw_key
from lightning_d9m.output.terminal import make_table, render
from lightning_d9m.text import escape

_MAX_LINES = 8


@dataclass(frozen=True)
class DistanceTable:
    """The content of the section.

    Attributes:
        drawing: The plot, as SVG; empty if there is nothing to draw.
        layers: (name, its line in the legend) of each column.
        rows: (epoch, step, the size in each column).
        error: The standard error of a size.
        without: Number of differing weights of which a run has no sketch.
    """

    drawing: str
    layers: Sequence[tuple[str, str]]
    rows: Sequence[tuple[int, int, Sequence[str]]]
    error: str
    without: int


def make_distance_table(timeline: Timeline) -> DistanceTable | None:
    """Return the section; None if no weight differs at the end of an epoch."""
    found = timeline.distances
    series = list(found.list_series(_MAX_LINES))
    if not series and not found.unknown:
        return None
    steps = sorted(found.moments)
    lines = [[(step, own[step].relative) for step in steps if step in own] for _, own in series]
    drawn = any(RESOLUTION <= value < math.inf for points in lines for _, value in points)
    label = "Size of the difference of each layer by step"
    return DistanceTable(
        drawing=draw_distances(label, lines, timeline.epochs) if drawn else "",
        layers=[(_name_layer(layer), draw_key(n)) for n, (layer, _) in enumerate(series)],
        rows=[
            (found.epochs[step], step, [_describe_distance(own.get(step)) for _, own in series])
            for step in steps
            if series
        ],
        error=f"{STANDARD_ERROR:.0%}",
        without=len(found.unknown),
    )


def list_distances(found: DistanceSeries) -> list[Mapping[str, object]]:
    """Return the distances for ``--json``: one entry for each epoch and layer that differs."""
    return [
        {
            "epoch": found.epochs[step],
            "step": step,
            "layer": layer,
            "relative": _finite(distance.relative),
            "absolute": _finite(math.sqrt(distance.square)),
            "tensors": distance.differing,
        }
        for step in sorted(found.moments)
        for layer, distance in found.moments[step].items()
        if distance.differing
    ]


def format_distances(found: DistanceSeries, width: int) -> list[str]:
    """Return the distances for a terminal: of each layer, that of the first and last epoch."""
    rows = []
    for layer, own in found.list_series(_MAX_LINES):
        differing = [step for step in sorted(own) if own[step].differing]
        sizes = [_describe_distance(own[step]) for step in (differing[0], max(own))]
        rows.append((escape(_name_layer(layer)), str(found.epochs[differing[0]]), *sizes))
    if not rows:
        return []
    table = make_table(("layer", "first epoch", "size there", "size at the end"), rows)
    title = f"How far the weights are apart, relative to their norm (+- {STANDARD_ERROR:.0%}):"
    return ["", title, *render(table, width).splitlines()]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _name_layer(layer: str) -> str:
    return "all other layers" if layer == OTHERS else layer or ROOT


def _describe_distance(distance: Distance | None) -> str:
    if distance is None:
        return ""
    if not distance.differing:
        return "equal"
    size = distance.relative
    if not math.isfinite(size):
        return "not finite"
    return f"{size:.1e}" if size >= RESOLUTION else f"below {RESOLUTION:g}"
