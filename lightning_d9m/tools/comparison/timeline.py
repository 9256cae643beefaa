"""The timeline of two runs: at which steps, ranks and modules they differ.

It is collected while two ledgers are compared.
"""

from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from typing import TypeAlias

from lightning_d9m.engine.ledger.differences import Divergence
from lightning_d9m.engine.ledger.format.records import Batch, Digests, ProbeKey
from lightning_d9m.engine.ledger.keys import Item
from lightning_d9m.engine.ledger.kinds import ROOT

MAX_COLUMNS = 64
MAX_SERIES = 24
_OF_MODULES = frozenset({"input", "output", "grad_output"})
_OF_PARAMETERS = frozenset({"weight", "buffer", "gradient", "local_gradient", "weights", "buffers"})

ValuePair: TypeAlias = tuple[int, float | None, float | None]
# A rank, or the path of a module.
TableRow: TypeAlias = int | str


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
        # Steps come in order, and how many there will be is not known: two columns become one when
        # there are too many, so memory does not grow with the run.
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
        rank: The rank whose values are kept; None before.
        left_out: The names of its other values.
        firsts: (epoch, step, batch, position, description) of the first place or entry that differs
            on any rank, by the path of its module, without its submodules; "" is the model itself.
    """

    steps: StepTable = field(default_factory=StepTable)
    values: dict[str, list[ValuePair]] = field(default_factory=dict)
    rank: int | None = None
    left_out: set[str] = field(default_factory=set)
    firsts: dict[str, tuple[int, int, int, int, str]] = field(default_factory=dict)

    def watch(
        self, rank: int, one: Item | None, other: Item | None, found: Divergence | None
    ) -> None:
        """Count a pair of records; a ``RecordObserver``."""
        item = other or one
        if not isinstance(item, Batch | Digests):
            return
        self.rank = rank if self.rank is None else self.rank
        if isinstance(item, Digests) and item.moment == "epoch" and rank == self.rank:
            values = [own.list_values() if isinstance(own, Digests) else {} for own in (one, other)]
            for name in values[0] | values[1]:
                if name in self.values or len(self.values) < MAX_SERIES:
                    pair = (values[0].get(name), values[1].get(name))
                    self.values.setdefault(name, []).append((item.step, *pair))
                else:
                    self.left_out.add(name)
        if one is None or other is None:
            size = item.size if isinstance(item, Batch) else 1
            self.steps.add(rank, item.step, alone=size)
            return
        if isinstance(item, Batch):
            # All places of a batch were compared, so modules that do not differ have cells, too.
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
            # Records of several ranks come one rank after the other, so a later one may show an
            # earlier difference.
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
