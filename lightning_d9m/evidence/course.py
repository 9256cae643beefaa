"""The course of two runs: how their difference grows, at which moments, in which modules.

Collected while two ledgers are compared, in bounded memory: steps are merged when they become many,
and of names and moments the first are kept and the rest counted.
"""

from dataclasses import dataclass, field

from lightning_d9m.evidence.alignment import Item, describe_record
from lightning_d9m.evidence.batches import OTHER, Batch, BatchComparison
from lightning_d9m.evidence.difference import record_difference
from lightning_d9m.evidence.layouts import unpack_places
from lightning_d9m.evidence.records import Digests

MAX_STEPS = 512
MAX_MOMENTS = 400
MAX_MODULES = 1_500
_NO_MODULE = {"batch", "loss", "scalar", "rng", "optimizer", "monitor", OTHER}


@dataclass(slots=True)
class Step:
    """What was compared in one step, or in several that were merged.

    Attributes:
        first: The first step.
        last: The last.
        compared: Number of places or entries, over all ranks.
        differing: How many of them differ.
    """

    first: int
    last: int
    compared: int = 0
    differing: int = 0


@dataclass(slots=True)
class Growth:
    """The number of differences by step, of one kind of evidence."""

    steps: dict[int, Step] = field(default_factory=dict)
    width: int = 1

    def add(self, step: int, compared: int, differing: int) -> None:
        """Count a step; neighbours are merged when there are more than ``MAX_STEPS``."""
        number = step // self.width
        entry = self.steps.setdefault(number, Step(step, step))
        entry.first, entry.last = min(entry.first, step), max(entry.last, step)
        entry.compared += compared
        entry.differing += differing
        while len(self.steps) > MAX_STEPS:
            merged = Growth(width=2 * self.width)
            for old in self.steps.values():
                merged.add(old.first, old.compared, old.differing)
                merged.steps[old.first // merged.width].last = old.last
            self.steps, self.width = merged.steps, merged.width

    def ordered(self) -> list[Step]:
        """Return the steps in order."""
        return [self.steps[number] for number in sorted(self.steps)]


@dataclass(frozen=True, slots=True)
class Moment:
    """A record of digests, and how it compares.

    Attributes:
        rank: The rank.
        where: The record in words.
        status: ``"equal"``, ``"different"``, ``"only expected"`` or ``"only actual"``.
        groups: (group, entries that differ, entries) for each group in which some differ.
    """

    rank: int
    where: str
    status: str
    groups: tuple[tuple[str, int, int], ...] = ()


@dataclass(slots=True)
class Module:
    """What differs in a module, its parameters and operations, without its submodules.

    Attributes:
        differing: Number of places and digests, over all steps and ranks.
        first: (rank, epoch, step, position, what) of the first that was met.
    """

    differing: int = 0
    first: tuple[int, int, int, int, str] | None = None


@dataclass(slots=True)
class Course:
    """Collects; hand ``watch`` to ``compare_ledgers``.

    Attributes:
        places: Growth of the difference among probes.
        weights: Growth of the difference among the digests of epochs.
        moments: The records of digests, at most ``MAX_MOMENTS``; those that differ count first.
        moments_left_out: How many more there were.
        modules: By path, at most ``MAX_MODULES``; "" is the model itself.
        modules_left_out: How many names found no room.
    """

    places: Growth = field(default_factory=Growth)
    weights: Growth = field(default_factory=Growth)
    moments: list[Moment] = field(default_factory=list)
    moments_left_out: int = 0
    modules: dict[str, Module] = field(default_factory=dict)
    modules_left_out: int = 0
    _seen: set[int] = field(default_factory=set)

    def watch(
        self, rank: int, one: Item | None, other: Item | None, found: BatchComparison | None
    ) -> None:
        """Take a pair."""
        if isinstance(one, Batch) and isinstance(other, Batch):
            self._take_batch(rank, one, found)
        elif isinstance(one, Digests) or isinstance(other, Digests):
            self._take_digests(rank, one, other)

    def _take_batch(self, rank: int, one: Batch, found: BatchComparison | None) -> None:
        for token in one.layouts:
            key = hash(token)
            if key not in self._seen and len(self._seen) < MAX_MODULES:
                self._seen.add(key)
                for kind, name, _ in unpack_places(token):
                    self._module(_module_of_place(kind, name))
        compared = one.size if found is None else found.places
        self.places.add(one.step, compared, 0 if found is None else found.count)
        for place in found.differing if found is not None else ():
            where = (rank, one.epoch, one.step, place.position, f"{place.kind} {place.name}")
            self._differs(_module_of_place(place.kind, place.name), where)

    def _take_digests(self, rank: int, one: Item | None, other: Item | None) -> None:
        record = other if isinstance(other, Digests) else one
        if not isinstance(record, Digests):
            return
        groups: tuple[tuple[str, int, int], ...] = ()
        weights = record.groups.get("weights", {})
        for name in weights:
            self._module(name.rpartition(".")[0])
        if one is None or other is None:
            status = "only actual" if one is None else "only expected"
        elif isinstance(one, Digests) and isinstance(other, Digests):
            difference = None if one is other else record_difference(one, other)
            status = "equal" if difference is None else "different"
            if difference is not None:
                groups = tuple((g, n, of) for g, (n, of) in difference.by_group.items())
            theirs = one.groups.get("weights", {})
            changed = [name for name, digest in weights.items() if theirs.get(name) != digest]
            self.weights.add(record.step, len(weights), len(changed))
            for number, name in enumerate(changed):
                where = (rank, record.epoch, record.step, number, f"weights {name}")
                self._differs(name.rpartition(".")[0], where)
        else:
            return
        if len(self.moments) < MAX_MOMENTS:
            self.moments.append(Moment(rank, describe_record(record), status, groups))
        else:
            self.moments_left_out += 1

    def _differs(self, path: str, where: tuple[int, int, int, int, str]) -> None:
        module = self._module(path)
        if module is not None:
            module.differing += 1
            module.first = module.first or where

    def _module(self, path: str) -> Module | None:
        found = self.modules.get(path)
        if found is None:
            if len(self.modules) >= MAX_MODULES:
                self.modules_left_out += 1
                return None
            found = self.modules[path] = Module()
        return found


def _module_of_place(kind: str, name: str) -> str:
    """Return the module that a place belongs to; "" is the model itself."""
    if kind in _NO_MODULE:
        return ""
    if kind == "op":
        return name.partition("::")[0].replace("/", ".")
    path = name.partition(":")[0]
    if kind in {"weight", "buffer", "gradient", "local_gradient"}:
        return path.rpartition(".")[0]
    return path
