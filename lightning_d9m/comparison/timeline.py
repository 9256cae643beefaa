"""The timeline of two runs: at which records they differ, in which modules, by how much.

It is collected while two ledgers are compared. Steps are merged when there are too many.
"""

from collections import defaultdict
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TypeAlias

from lightning_d9m.comparison.differences import Divergence, PlaceDifference
from lightning_d9m.comparison.weight_distance import DistanceSeries
from lightning_d9m.ledger.format.frames import Batch, unpack_places
from lightning_d9m.ledger.format.records import Digests
from lightning_d9m.ledger.keys import Item
from lightning_d9m.ledger.kinds import ROOT

# Most steps that a histogram keeps: as many as a heat map has columns.
MAX_STEPS = 64
MAX_EPOCHS = 10_000
MAX_SERIES = 24
_OF_MODULES = frozenset({"input", "output", "grad_output"})
_OF_PARAMETERS = frozenset({"weight", "buffer", "gradient", "local_gradient", "weights", "buffers"})


ValuePair: TypeAlias = tuple[int, float | None, float | None]


@dataclass(slots=True)
class TimelineStep:
    """The counts of one step, or of several merged ones.

    Attributes:
        first: The first step.
        last: The last.
        differing: Number of places or entries that differ, over all ranks.
        alone: Number of records or places that only one run has.
    """

    first: int
    last: int
    differing: int = 0
    alone: int = 0


@dataclass(slots=True)
class StepHistogram:
    """The number of differences by step; neighbors are merged if there are too many."""

    steps: dict[int, TimelineStep] = field(default_factory=dict)
    width: int = 1

    def add(self, step: int, differing: int, alone: int = 0) -> None:
        """Count a step."""
        self._merge(TimelineStep(step, step, differing, alone))
        while len(self.steps) > MAX_STEPS:
            old, self.steps, self.width = self.steps, {}, 2 * self.width
            for entry in old.values():
                self._merge(entry)

    def _merge(self, new: TimelineStep) -> None:
        entry = self.steps.setdefault(new.first // self.width, new)
        if entry is not new:
            entry.first, entry.last = min(entry.first, new.first), max(entry.last, new.last)
            entry.differing += new.differing
            entry.alone += new.alone

    def ordered(self) -> list[TimelineStep]:
        """Return the steps in order."""
        return [self.steps[number] for number in sorted(self.steps)]


@dataclass(slots=True)
class Module:
    """The differences in a module, its parameters and operations, without its submodules.

    Attributes:
        differing: Number of places and digests, over all steps and ranks.
        first: (epoch, step, batch, position, description) of the first one on any rank.
        steps: The steps at which digests of it were compared, with the differences.
    """

    differing: int = 0
    first: tuple[int, int, int, int, str] | None = None
    steps: StepHistogram = field(default_factory=StepHistogram)


@dataclass(slots=True)
class Timeline:
    """Collects the timeline; pass ``watch`` to ``compare_ledgers``.

    Attributes:
        ranks: All that was compared on each rank, by step.
        epochs: The first step of each epoch, at most ``MAX_EPOCHS``.
        values: The loss and the logged values of the first rank by name, at most ``MAX_SERIES``:
            (step, the reference's value, this run's value), None where a run has no such record.
        distances: How far the weights of each layer are apart at the ends of epochs.
        modules: Modules by path; "" is the model itself.
    """

    ranks: dict[int, StepHistogram] = field(default_factory=lambda: defaultdict(StepHistogram))
    epochs: dict[int, int] = field(default_factory=dict)
    values: dict[str, list[ValuePair]] = field(default_factory=dict)
    distances: DistanceSeries = field(default_factory=DistanceSeries)
    modules: dict[str, Module] = field(default_factory=lambda: defaultdict(Module))
    _rank: int | None = None  # whose values are kept

    @property
    def differs(self) -> bool:
        """True if a place of any module differs."""
        return any(module.differing for module in self.modules.values())

    def watch(
        self, rank: int, one: Item | None, other: Item | None, found: Divergence | None
    ) -> None:
        """Count a pair of records; a ``RecordObserver``."""
        self.distances.watch(rank, one, other, found)
        item = one or other
        if isinstance(item, Batch):
            self._note_epoch(item.epoch, item.step)
            self._take_batch(rank, item, alone=one is None or other is None, found=found)
        elif isinstance(item, Digests):
            self._note_epoch(item.epoch + (item.moment == "epoch"), item.step)
            self._take_digests(rank, one, other, found)
            self._take_values(rank, item, one, other)

    def _note_epoch(self, epoch: int, step: int) -> None:
        if len(self.epochs) < MAX_EPOCHS:
            self.epochs[epoch] = min(step, self.epochs.get(epoch, step))

    def _take_batch(
        self, rank: int, batch: Batch, *, alone: bool, found: Divergence | None
    ) -> None:
        steps = self.ranks[rank]
        if alone:
            steps.add(batch.step, 0, batch.size)
            return
        for path in _list_modules(batch.layouts):
            self.modules[path].steps.add(batch.step, 0)
        steps.add(batch.step, *((0, 0) if found is None else (found.count, len(found.one_sided))))
        for place in () if found is None else found.places:
            self._differs((batch.epoch, batch.step, batch.batch), place)

    def _take_digests(
        self, rank: int, one: Item | None, other: Item | None, found: Divergence | None
    ) -> None:
        if not isinstance(one, Digests) or not isinstance(other, Digests):
            if isinstance(item := one or other, Digests):
                self.ranks[rank].add(item.step, 0, 1)
            return
        named = ((group, name) for group, names in other.groups.items() for name in names)
        for path in {module_of(*entry) for entry in named}:
            self.modules[path].steps.add(other.step, 0)
        places = () if found is None else found.places
        self.ranks[rank].add(other.step, len(places))
        for place in places:  # after the batches of its epoch
            self._differs((other.epoch, other.step, 2**63), place)

    def _take_values(self, rank: int, item: Digests, one: Item | None, other: Item | None) -> None:
        self._rank = rank if self._rank is None else self._rank
        if rank != self._rank or item.moment != "epoch":
            return
        values = [own.list_values() if isinstance(own, Digests) else {} for own in (one, other)]
        for name in values[0] | values[1]:
            if name in self.values or len(self.values) < MAX_SERIES:
                pair = (values[0].get(name), values[1].get(name))
                self.values.setdefault(name, []).append((item.step, *pair))

    def _differs(self, when: tuple[int, int, int], place: PlaceDifference) -> None:
        """Count a place of a module that differs in (epoch, step, batch)."""
        module = self.modules[module_of(place.kind, place.name)]
        module.differing += 1
        module.steps.add(when[1], 1)
        where = (*when, place.position, f"{place.kind} {place.name}")
        if module.first is None or where < module.first:
            module.first = where


# A training has few layouts.
@lru_cache(maxsize=4)
def _list_modules(layouts: tuple[bytes, ...]) -> frozenset[str]:
    """Return the modules whose places a batch holds."""
    places = (place for token in layouts for place in unpack_places(token))
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
