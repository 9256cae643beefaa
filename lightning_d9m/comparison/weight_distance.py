"""Distances of the weights of two runs, estimated from the sketches in their ledgers.

The squares of the differences of two sketches' numbers add up to an unbiased estimate of the
squared Euclidean norm of the difference; the relative standard error of the norm is about
``sqrt(1 / (2 * SKETCH_BUCKETS))``, 25%. Equal digests are a distance of exactly zero. See
``hashing.training_state``.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from struct import unpack

from msgspec.structs import replace

from lightning_d9m.errors import LedgerError
from lightning_d9m.ledger.folder import Ledger
from lightning_d9m.ledger.format.records import SKETCH_BUCKETS, Digests
from lightning_d9m.ledger.keys import Item

# Relative distances below it are those of the rounding of the sketches themselves.
RESOLUTION = 1e-14
STANDARD_ERROR = math.sqrt(1 / (2 * SKETCH_BUCKETS))
MAX_KEPT_EPOCHS = 256
# Stands for all layers but the greatest; no layer has this name.
OTHERS = "..."


@dataclass(frozen=True, slots=True)
class Distance:
    """The estimated distance of weights.

    Attributes:
        square: The squared norm of the difference; 0.0 only if all weights are equal, NaN if some
            are not finite.
        norm: The greater of both runs' squared norms.
        differing: Number of tensors that differ.
    """

    square: float
    norm: float
    differing: int

    @property
    def relative(self) -> float:
        """The norm of the difference over that of the weights, NaN if some are not finite."""
        if not self.differing:
            return 0.0
        return math.sqrt(self.square / self.norm) if self.norm else 0.0 * self.square

    def __add__(self, other: "Distance") -> "Distance":
        return Distance(
            self.square + other.square,
            self.norm + other.norm,
            self.differing + other.differing,
        )


NO_DISTANCE = Distance(0.0, 0.0, 0)


def add_up(distances: Iterable[Distance | None]) -> float:
    """Return the relative distance of several weights together; NaN if one is not known.

    >>> add_up([Distance(0.0, 1.0, 0), Distance(3.0, 2.0, 1)]), add_up([None])
    (1.0, nan)
    """
    found = list(distances)
    known = [distance for distance in found if distance is not None]
    return sum(known, NO_DISTANCE).relative if len(known) == len(found) else math.nan


def read_ends(ledger: Ledger) -> list[Digests]:
    """Return the records of the ends of epochs and of the fit, of the lowest rank.

    The record of the last epoch lends its sketches to the last record, which has none, if both have
    the same weights.

    Raises:
        LedgerError: If the fit did not finish.
    """
    records = [
        record
        for record in ledger.line_records(min(ledger.files))
        if isinstance(record, Digests) and record.moment in ("epoch", "final")
    ]
    if not records or records[-1].moment != "final":
        raise LedgerError(
            f"The training of {ledger.path} did not finish, so it cannot be measured. Its log, "
            "output.log in the same folder, may say why. Use trainings that finished."
        )
    before, last = records[-2:] if records[1:] else (records[-1], records[-1])
    if not last.sketches and before.totals.get("weights") == last.totals.get("weights"):
        records[-1] = replace(last, sketches=before.sketches)
    return records


def measure_distances(expected: Digests, actual: Digests) -> dict[str, Distance | None]:
    """Return the distance of each weight that both records name; None if it is not known.

    That is one that differs and of which a record has no sketch.
    """
    weights = actual.groups.get("weights", {})
    found: dict[str, Distance | None] = {}
    for name, digest in expected.groups.get("weights", {}).items():
        if name not in weights:
            continue
        equal = digest == weights[name]
        sketches = [record.sketches.get(name) for record in (expected, actual)]
        one, other = (
            unpack(f"<{SKETCH_BUCKETS}d", bytes.fromhex(sketch)) if sketch else ()
            for sketch in sketches
        )
        if not one or not other:
            found[name] = NO_DISTANCE if equal else None
            continue
        norm = max(sum(x * x for x in one), sum(x * x for x in other))
        square = 0.0 if equal else sum((x - y) ** 2 for x, y in zip(one, other, strict=True))
        known = equal or math.isfinite(norm)
        found[name] = Distance(square if known else math.nan, norm, int(not equal))
    return found


def _rate(distance: Distance) -> float:
    """Return the relative distance; infinity if weights are not finite."""
    return math.inf if math.isnan(distance.relative) else distance.relative


@dataclass(slots=True)
class DistanceSeries:
    """The distances of the layers of two runs, at the ends of epochs.

    Of several ranks, the greatest distance of each layer counts. If there are more than
    ``MAX_KEPT_EPOCHS`` epochs, every second one is kept.

    Attributes:
        moments: For each step, the distance by layer.
        epochs: The epoch that ends at each step.
        unknown: Names of differing weights of which a run has no sketch.
    """

    moments: dict[int, dict[str, Distance]] = field(default_factory=dict)
    epochs: dict[int, int] = field(default_factory=dict)
    unknown: dict[str, None] = field(default_factory=dict)
    _stride: int = 1

    def watch(self, _: int, one: Item | None, other: Item | None, _found: object) -> None:
        """Add a pair of records if it is the end of an epoch; a ``RecordObserver``."""
        if isinstance(one, Digests) and isinstance(other, Digests) and other.moment == "epoch":
            self.add(one, other)

    def add(self, expected: Digests, actual: Digests) -> None:
        """Add the records of one rank at the end of an epoch."""
        if actual.epoch % self._stride:
            return
        layers: dict[str, Distance] = {}
        for name, own in measure_distances(expected, actual).items():
            if own is None:
                self.unknown[name] = None
            else:
                layer = name.rpartition(".")[0]
                layers[layer] = layers.get(layer, NO_DISTANCE) + own
        if not layers:
            return
        known = self.moments.setdefault(actual.step, {})
        for layer, distance in layers.items():
            if layer not in known or _rate(distance) > _rate(known[layer]):
                known[layer] = distance
        self.epochs[actual.step] = actual.epoch
        if len(self.moments) > MAX_KEPT_EPOCHS:
            self._stride *= 2
            left_out = [step for step, epoch in self.epochs.items() if epoch % self._stride]
            for step in left_out or [actual.step]:
                del self.moments[step], self.epochs[step]

    def rank_layers(self) -> list[str]:
        """Return the layers that differ, those with the greatest relative distance first."""
        greatest: dict[str, float] = {}
        for distances in self.moments.values():
            for layer, distance in distances.items():
                if distance.differing:
                    greatest[layer] = max(_rate(distance), greatest.get(layer, 0.0))
        return sorted(greatest, key=lambda layer: -greatest[layer])

    def list_series(self, count: int) -> Iterator[tuple[str, Mapping[int, Distance]]]:
        """Yield (layer, distance by step) of the ``count`` greatest, and the sum of all others.

        The others include the layers that never differ.
        """
        shown = self.rank_layers()[:count]
        for layer in shown:
            yield layer, {s: found[layer] for s, found in self.moments.items() if layer in found}
        others: dict[int, Distance] = {}
        for step, found in self.moments.items():
            for layer, distance in found.items():
                if layer not in shown:
                    others[step] = others.get(step, NO_DISTANCE) + distance
        if any(distance.differing for distance in others.values()):
            yield OTHERS, others
