"""The timeline of two runs: at which steps, ranks and modules they differ, and by how much.

It is collected while two ledgers are compared. Distances of weights are estimated from the sketches
in the ledgers: the squares of the differences of two sketches' numbers add up to an unbiased
estimate of the squared Euclidean norm of the difference; the relative standard error of the norm is
about ``sqrt(1 / (2 * SKETCH_BUCKETS))``, 25%. Equal digests are a distance of exactly zero. See
``hashing.training_state``.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from struct import unpack
from typing import TypeAlias

from msgspec.structs import replace

from lightning_d9m.engine.ledger.differences import Divergence
from lightning_d9m.engine.ledger.folder import Ledger
from lightning_d9m.engine.ledger.format.records import SKETCH_BUCKETS, Batch, Digests, ProbeKey
from lightning_d9m.engine.ledger.keys import Item
from lightning_d9m.engine.ledger.kinds import ROOT
from lightning_d9m.errors import LedgerError

# Relative distances below it are those of the rounding of the sketches themselves.
RESOLUTION = 1e-14
STANDARD_ERROR = math.sqrt(1 / (2 * SKETCH_BUCKETS))
MAX_KEPT_EPOCHS = 256
# Stands for all layers but the greatest; no layer has this name.
OTHERS = "..."
MAX_COLUMNS = 64
MAX_SERIES = 24
_OF_MODULES = frozenset({"input", "output", "grad_output"})
_OF_PARAMETERS = frozenset({"weight", "buffer", "gradient", "local_gradient", "weights", "buffers"})

ValuePair: TypeAlias = tuple[int, float | None, float | None]
# A rank, or the path of a module.
TableRow: TypeAlias = int | str


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


@dataclass(slots=True)
class StepTable:
    """The differences by row and step.

    A column is one step, or as many as a power of two if there are more than ``MAX_COLUMNS``.

    Attributes:
        rows: For each row, by column: [number of places or entries that differ, number of records
            or places that only one run has].
        width: The number of steps of a column.
        first: The first step.
        last: The last step.
    """

    rows: dict[TableRow, dict[int, list[int]]] = field(default_factory=dict)
    width: int = 1
    first: int = 2**63
    last: int = 0

    @property
    def columns(self) -> range:
        """The columns from the first step to the last."""
        return range(self.first // self.width, self.last // self.width + 1)

    def add(self, row: TableRow, step: int, differing: int = 0, alone: int = 0) -> None:
        """Count a step of a row."""
        self.first, self.last = min(self.first, step), max(self.last, step)
        while self.last // self.width - self.first // self.width >= MAX_COLUMNS:
            rows, self.rows, self.width = self.rows, {}, 2 * self.width
            for name, cells in rows.items():
                for column, counts in cells.items():
                    self._count(name, column // 2, *counts)
        self._count(row, step // self.width, differing, alone)

    def _count(self, row: TableRow, column: int, differing: int, alone: int) -> None:
        cell = self.rows.setdefault(row, {}).setdefault(column, [0, 0])
        cell[0] += differing
        cell[1] += alone


@dataclass(slots=True)
class Timeline:
    """Collects the timeline; pass ``watch`` to ``compare_ledgers``.

    Attributes:
        steps: All that was compared on each rank and of each module, by step.
        values: The loss and the logged values of the first rank by name, at most ``MAX_SERIES``:
            (step, the reference's value, this run's value), None where a run has no such record.
        distances: How far the weights of each layer are apart at the ends of epochs.
        firsts: (epoch, step, batch, position, description) of the first place or entry that differs
            on any rank, by the path of its module, without its submodules; "" is the model itself.
    """

    steps: StepTable = field(default_factory=StepTable)
    values: dict[str, list[ValuePair]] = field(default_factory=dict)
    distances: DistanceSeries = field(default_factory=DistanceSeries)
    firsts: dict[str, tuple[int, int, int, int, str]] = field(default_factory=dict)
    _rank: int | None = None  # whose values are kept

    def watch(
        self, rank: int, one: Item | None, other: Item | None, found: Divergence | None
    ) -> None:
        """Count a pair of records; a ``RecordObserver``."""
        self.distances.watch(rank, one, other, found)
        item = other or one
        if not isinstance(item, Batch | Digests):
            return
        self._rank = rank if self._rank is None else self._rank
        if isinstance(item, Digests) and item.moment == "epoch" and rank == self._rank:
            values = [own.list_values() if isinstance(own, Digests) else {} for own in (one, other)]
            for name in values[0] | values[1]:
                if name in self.values or len(self.values) < MAX_SERIES:
                    pair = (values[0].get(name), values[1].get(name))
                    self.values.setdefault(name, []).append((item.step, *pair))
        if one is None or other is None:
            size = item.size if isinstance(item, Batch) else 1
            self.steps.add(rank, item.step, alone=size)
            return
        if isinstance(item, Batch):
            modules, when = _list_modules(item.layouts), item.batch
        else:  # after the batches of its epoch
            named = ((group, name) for group, names in item.groups.items() for name in names)
            modules, when = frozenset(module_of(*entry) for entry in named), 2**63
        for path in modules:
            self.steps.add(path, item.step)
        places = () if found is None else found.places
        alone = 0 if found is None else len(found.one_sided)
        self.steps.add(rank, item.step, len(places), alone)
        for place in places:
            path = module_of(place.kind, place.name)
            self.steps.add(path, item.step, 1)
            where = (item.epoch, item.step, when, place.position, f"{place.kind} {place.name}")
            self.firsts[path] = min(where, self.firsts.get(path, where))


# A training has few layouts.
@lru_cache(maxsize=4)
def _list_modules(layouts: tuple[tuple[ProbeKey, ...], ...]) -> frozenset[str]:
    """Return the modules whose places a batch holds."""
    places = chain.from_iterable(layouts)
    return frozenset(module_of(kind, name) for kind, name, _ in places)


def module_of(kind: str, name: str) -> str:
    """Return the path of the module that a place or a digest belongs to; "" is the model itself.

    >>> module_of("output", "encoder.0:hidden"), module_of("gradient", "encoder.0.weight")
    ('encoder.0', 'encoder.0')
    >>> module_of("op", "encoder.0::aten.mm.default"), module_of("loss", "loss")
    ('encoder.0', '')
    """
    if kind == "op":
        return name.partition("::")[0].removeprefix(ROOT)
    path = name.partition(":")[0]
    if kind in _OF_PARAMETERS:
        return path.rpartition(".")[0]
    return path.removeprefix(ROOT) if kind in _OF_MODULES else ""
