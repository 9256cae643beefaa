"""The differences between two records, for the check in a run and the comparison of ledgers.

Headers and the facts of runs differ in fields; records of digests, other records, and the probes of
a batch differ in places.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

from lightning_d9m.engine.ledger.format.records import (
    Batch,
    Digests,
    End,
    Header,
    Json,
    LoaderFacts,
    ProbeKey,
    Record,
    RunFacts,
    StepDigests,
    find_uncompared,
    list_compared,
)
from lightning_d9m.engine.ledger.keys import Item, describe_record
from lightning_d9m.engine.ledger.kinds import COMMITTED, EXCEPTION, FINAL, PROBE_KINDS, STEP
from lightning_d9m.engine.ledger.stack import MISSING, same_logical_ranks, table_differences
from lightning_d9m.text import cut_digests, describe_names, escape

Table: TypeAlias = Mapping[str, Json]

NAMES_KEPT = 10  # more than a message shows, for those who catch the error
# Most places of the first divergence that are kept; all are counted. A step whose operations are
# probed may have a hundred thousand.
PLACES_KEPT = 10_000
_TOTAL = "(total)"
# Kind of the place that stands for the step of a batch.
OTHER = "other fields"
# The kinds that each rank computes alone: from the inputs up to the exchange of gradients.
_COMPUTED = PROBE_KINDS[PROBE_KINDS.index("input") : PROBE_KINDS.index("gradient")]
GROUPS = ("weights", "buffers", "optimizers", "schedulers")
# Kind of probe by the group of digests that holds the same values.
KIND_OF_GROUP = {"weights": "weight", "buffers": "buffer", "optimizers": "optimizer"}

# Settings of probes. What was probed is not what was computed: probes only read.
PROBE_SETTINGS = frozenset({"probes", "probe_modules", "probe_steps"})
# Settings in which two comparable runs may differ, each with the reason.
INFORMATIONAL_SETTINGS = {
    **dict.fromkeys(PROBE_SETTINGS, "runs are compared in the probes that both have"),
    "seed": "the header has the seed that was used",
    "overridden": "names settings of the program that the session has switched off",
    "threads": "the stack has the number of threads that was used",
    "fill_uninitialized_memory": "changes nothing if a program reads only what it wrote",
}

REASONS = {
    "seed": "A different seed draws different random numbers, so every digest differs by design.",
    "fit": "Each fit of a process draws its own random numbers, so only fits with the same "
    "ordinal can agree.",
    "world_size": "A different number of ranks gives each rank different batches and sums "
    "gradients in a different order.",
    "model": "Names, shapes or dtypes of the weights differ, so their digests cannot agree.",
    "dataset": "The training data have a different size, so the batches differ.",
    "batch_size": "A different batch size gives different batches.",
    "batches": "A different number of batches makes each epoch end at a different step.",
}


@dataclass(frozen=True, slots=True)
class FieldDifference:
    """A field of the header or of the run in which two ledgers differ.

    Attributes:
        field: Its name.
        expected: Its value in the earlier run, or ``"missing"``.
        actual: Its value in the later run, or ``"missing"``.
        ranks: The ranks on which it differs in this way.
    """

    field: str
    expected: object
    actual: object
    ranks: tuple[int, ...] = ()

    @property
    def reason(self) -> str:
        """Why runs that differ in this field cannot be bit-exact."""
        return REASONS.get(self.field, "It changes what is computed.")

    @property
    def shown(self) -> Sequence[object]:
        """Both values as they are shown; the digest of a model is cut."""
        if self.field == "model":
            return cut_digests([str(self.expected), str(self.actual)])
        return self.expected, self.actual


class PlaceDifference(NamedTuple):
    """A place or an entry of a record that differs, or that only one run has.

    Attributes:
        position: Index of the place in order of execution within its batch, in the earlier run; in
            the later run if only that one has the place. Of a record, the number of the entry among
            those that differ.
        kind: Kind of the place (``"output"``, ``"gradient"``, ...), or the group of the entry
            (``"weights"``, ``"loss"``, ...).
        name: Its name.
        call: Number of earlier occurrences of this kind and name in the batch.
        expected: The value or digest in the earlier run; None if it does not have the place.
        actual: The same in the later run.
    """

    position: int
    kind: str
    name: str
    call: int
    expected: str | None
    actual: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """The difference between a record, or the probes of a batch, and its counterpart.

    Attributes:
        rank: The rank.
        where: Description of the record, for people.
        moment: ``"batch"`` for probes; of digests ``"initial"``, ``"epoch"``, ``"final"`` or
            ``"exception"``; ``"step"`` after one of the first steps that follow a checkpoint; empty
            for another record.
        epoch: Counted from 0.
        step: The global step (when the batch began) in the later run.
        batch: Index of the batch within its epoch; None without probes.
        places: The places that differ, in order of execution; the entries of a record in the order
            weights, buffers, optimizers, schedulers, loss, scalars, step. See ``keep``.
        count: Number of places that differ.
        compared: Number of places or entries that were compared.
        by_kind: (places that differ, places) for each kind in which some differ.
        one_sided: Places of the batch that only one run has.
        steps: The global step in the earlier run and in the later one.
    """

    rank: int = 0
    where: str = ""
    moment: str
    epoch: int
    step: int
    batch: int | None = None
    places: Sequence[PlaceDifference]
    count: int
    compared: int
    by_kind: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    one_sided: Sequence[PlaceDifference] = ()
    steps: tuple[int, int] = (0, 0)

    @property
    def kind(self) -> str:
        """The kind or group of the first place that differs."""
        return self.places[0].kind

    @property
    def name(self) -> str:
        """The name of the first place that differs."""
        return self.places[0].name

    @property
    def call(self) -> int:
        """The call of the first place that differs."""
        return self.places[0].call

    @property
    def position(self) -> int:
        """The position of the first place that differs."""
        return self.places[0].position

    @property
    def expected(self) -> str:
        """The first place's value in the earlier run, or ``"missing"``."""
        value = self.places[0].expected
        return MISSING if value is None else value

    @property
    def actual(self) -> str:
        """The first place's value in the later run, or ``"missing"``."""
        value = self.places[0].actual
        return MISSING if value is None else value

    @property
    def names(self) -> tuple[str, ...]:
        """The first names that differ in the kind of the first place, at most ``NAMES_KEPT``."""
        alike = [place for place in self.places if place.kind == self.kind][:NAMES_KEPT]
        return tuple(name_call(place.name, place.call) for place in alike)

    @property
    def is_end(self) -> bool:
        """True if the runs differ in how they ended."""
        return self.moment == "" and self.kind == "end"

    @property
    def when(self) -> tuple[int, ...]:
        """Sort key in the order of execution, for the differences of all ranks."""
        # Within a batch the kind decides, and among the kinds that the batch computes the position:
        # a value that one rank computes differently reaches the other ranks later, with the
        # gradients or another exchange.
        if self.is_end:
            return (2**63,)
        phase = {"initial": 0, "batch": 1, "epoch": 2, FINAL: 3, EXCEPTION: 3}.get(self.moment, 1)
        when = (self.epoch, phase, self.step, self.batch or 0)
        if self.kind in _COMPUTED:
            return (*when, PROBE_KINDS.index("input"), self.position)
        return (*when, PROBE_KINDS.index(self.kind) if self.kind in PROBE_KINDS else 0, 0)

    def keep(self, rank: int) -> "Divergence":
        """Return the difference as that of a rank, with at most ``PLACES_KEPT`` places."""
        places, alone = tuple(self.places[:PLACES_KEPT]), tuple(self.one_sided[:PLACES_KEPT])
        return replace(self, rank=rank, places=places, one_sided=alone)

    @property
    def facts(self) -> dict[str, Any]:
        """The facts that a ``DriftError`` has of the difference."""
        alike = ("moment", "epoch", "step", "names", "count", "expected", "actual")
        named = {name: getattr(self, name) for name in alike}
        return {**named, "group": self.kind, "total": self.compared}

    def describe_kinds(self) -> list[str]:
        """Return a line with the number of places that differ in each kind, if it is not one."""
        parts = [f"{escape(kind)} {n} of {of}" for kind, (n, of) in self.by_kind.items()]
        return [f"In all: {', '.join(parts)}."] if parts[1:] else []

    def as_json(self) -> dict[str, object]:
        """Return the difference as JSON types."""
        named = ("rank", "where", "moment", "epoch", "step", "batch", "kind", "name", "call")
        counted = ("position", "expected", "actual", "places", "count", "compared", "one_sided")
        return {name: getattr(self, name) for name in (*named, *counted, "by_kind")}


def name_value(kind: str, name: str) -> str:
    """Return a place as a program would write it.

    >>> name_value("batch", "batch:0"), name_value("weight", "a.weight")
    ('batch[0]', 'weight a.weight')
    >>> name_value("batch", "batch:x.0")
    "batch['x'][0]"
    """
    if kind != "batch":
        return f"{kind} {name}"
    owner, _, path = name.partition(":")
    keys = (part if part.isdecimal() else repr(part) for part in path.split(".") if part)
    return owner + "".join(f"[{key}]" for key in keys)


def name_call(name: str, call: int) -> str:
    """Return the name of a place, with the number of the call unless it is the first.

    >>> name_call("encoder", 0), name_call("encoder", 2)
    ('encoder', 'encoder (call 2)')
    """
    return f"{name} (call {call})" if call else name


def header_differences(
    expected: Header, actual: Header
) -> tuple[list[FieldDifference], list[FieldDifference]]:
    """Return the fields that make the runs of two headers incomparable, and other settings."""
    # With logical ranks the bits do not depend on the number of processes.
    any_processes = same_logical_ranks(expected.stack, actual.stack)
    refusals, settings = [], []
    # `stack_differences` compares the stacks, which a policy of the user judges.
    apart = {"settings", "stack", *(("world_size",) if any_processes else ())}
    # The seed first: a different one changes everything else by design, and a reader sees the first
    # field's reason alone.
    for name in sorted(list_compared(Header), key="seed".__ne__):
        values = getattr(expected, name), getattr(actual, name)
        if name not in apart and values[0] != values[1]:
            refusals.append(FieldDifference(name, *values))
    for name, *both in table_differences(expected.settings, actual.settings):
        if name not in INFORMATIONAL_SETTINGS:
            refusals.append(FieldDifference(f"settings.{name}", *both))
        elif name != "seed":
            settings.append(FieldDifference(name, *both))
    return refusals, settings


def list_varying_ops(*headers: Header) -> tuple[str, ...]:
    """Return the ops that some of the runs allowed although they may vary."""
    given = (str(header.settings.get("varying_ops", "")).split() for header in headers)
    return tuple(sorted(set(chain.from_iterable(given))))


def describe_varying(ops: Sequence[str]) -> str:
    """Return a sentence about such ops, which belongs to every verdict; empty without any."""
    if not ops:
        return ""
    names = describe_names(ops, len(ops))
    return f"Another run may differ: varying_ops lets {names} run, whose results may vary."


def run_refusals(expected: RunFacts, actual: RunFacts) -> list[FieldDifference]:
    """Return the facts that make two runs incomparable: model, data, the Trainer's arithmetic."""
    tables = (_run_table(facts) for facts in (expected, actual))
    return [FieldDifference(*difference) for difference in table_differences(*tables)]


def _run_table(facts: RunFacts) -> dict[str, Json]:
    """Return the facts by the names under which differences are reported, causes first."""
    table: dict[str, Json] = {"model": f"{facts.model} ({facts.parameters} parameters)"}
    units = {"batch_size": "samples a batch", "batches": "batches an epoch"}
    for name in list_compared(LoaderFacts):
        # In one value, so that a different number of dataloaders shows too.
        values = [getattr(loader, name) for loader in facts.train]
        counted = " + ".join("unknown" if value is None else str(value) for value in values)
        title = "dataset" if name == "samples" else name
        table[title] = f"{counted or 'no'} {units.get(name, name)}"
    shown = ("model", "parameters", "train")
    others = [name for name in list_compared(RunFacts) if name not in shown]
    return table | _flatten({name: getattr(facts, name) for name in others})


def _flatten(fields: Mapping[str, Json]) -> dict[str, Json]:
    """Return fields, and in place of a mapping its entries, by dotted names."""
    flat: dict[str, Json] = {}
    for name, value in fields.items():
        inner = value if isinstance(value, Mapping) else {"": value}
        flat |= {f"{name}.{key}" if key else name: entry for key, entry in inner.items()}
    return flat


def find_difference(expected: Item, actual: Item) -> Divergence | None:
    """Return how a record, or the probes of a batch, differ from their counterpart.

    None if their contents are equal. The difference of a batch may consist of places that only one
    run has; then its ``count`` is 0. Entries keep the order of the earlier run, which is the order
    of the model.
    """
    if expected is actual:
        return None
    if isinstance(expected, Batch) and isinstance(actual, Batch):
        return _batch_difference(expected, actual)
    if isinstance(expected, Batch) or isinstance(actual, Batch):
        return None
    by_kind: dict[str, tuple[int, int]] = {}
    places: list[PlaceDifference] = []
    compared = 0
    for group, (one, other) in _tables(expected, actual).items():
        names = one.keys() | other.keys()
        size = len(names) - (_TOTAL in names and len(names) > 1)
        compared += size
        differing = table_differences(one, other)
        # A group's total differs whenever an entry does, so it is listed only if nothing else is.
        named = [entry for entry in differing if entry[0] != _TOTAL] or differing
        if named:
            by_kind[group] = (len(named), size)
        for name, *values in named:
            before, after = (None if value is MISSING else str(value) for value in values)
            places.append(PlaceDifference(len(places), group, name, 0, before, after))
    if not places:
        return None
    steps = (getattr(expected, "step", 0), getattr(actual, "step", 0))
    # Of two ends the first, up to which both runs were equal.
    shown = expected if isinstance(actual, End) and steps[0] < steps[1] else actual
    return Divergence(
        where=describe_record(shown),
        moment=STEP if isinstance(actual, StepDigests) else getattr(actual, "moment", ""),
        epoch=getattr(shown, "epoch", 0),
        step=getattr(shown, "step", 0),
        places=places,
        count=len(places),
        compared=compared,
        by_kind=by_kind,
        steps=steps,
    )


def _tables(expected: Record, actual: Record) -> dict[str, tuple[Table, Table]]:
    """Return the contents of two records by group: the digests, or the fields that are compared."""
    if isinstance(expected, Digests | StepDigests) and isinstance(actual, Digests | StepDigests):
        tables = _group_tables(expected, actual)
        # The step comes last: two runs whose steps differ mostly differ in what they trained.
        for name in sorted(list_compared(type(expected)), key="step".__eq__):
            if name not in ("totals", "groups"):
                values = (getattr(record, name, None) for record in (expected, actual))
                one, other = (_as_table(name, value) for value in values)
                tables[name] = one, other
        return tables
    return {expected.kind: (_compared_fields(expected), _compared_fields(actual))}


def _compared_fields(record: Record) -> Table:
    uncompared = find_uncompared(type(record))
    fields = record.as_record()
    return _flatten({name: fields[name] for name in fields if name not in uncompared})


def _as_table(name: str, value: Json) -> Table:
    if isinstance(value, Mapping):
        return value
    shown = {"step": "global step"}.get(name, name)
    return {} if value is None else {shown: str(value)}


def _group_tables(
    expected: Digests | StepDigests, actual: Digests | StepDigests
) -> dict[str, tuple[Table, Table]]:
    """Return the digests of two records by group."""
    named = [getattr(record, "groups", {}) for record in (expected, actual)]
    known = (expected.totals, actual.totals)
    tables: dict[str, tuple[Table, Table]] = {}
    for group in dict.fromkeys((*GROUPS, *named[0], *known[0], *named[1], *known[1])):
        totals = [{_TOTAL: table[group]} if group in table else {} for table in known]
        if group in COMMITTED and not all(totals):
            continue  # the other run was not recorded for a proof
        one, other = (groups.get(group, {}) for groups in named)
        if (group in named[0]) != (group in named[1]) and all(totals):
            tables[group] = totals[0], totals[1]  # one record has no names
        # Equal totals of groups without entries say nothing.
        elif one or other or group not in named[0] or totals[0] != totals[1]:
            tables[group] = {**one, **totals[0]}, {**other, **totals[1]}
    return tables


def _batch_difference(expected: Batch, actual: Batch) -> Divergence:
    """Compare the probes of one batch with their counterparts, place by place."""
    ours, theirs = _number_places(expected.layouts), _number_places(actual.layouts)
    one, other = expected.list_digests(), actual.list_digests()
    both = [(key[0], n, theirs[key]) for key, n in ours.items() if key in theirs]
    places = []
    if expected.step != actual.step:
        steps = str(expected.step), str(actual.step)
        places.append(PlaceDifference(0, OTHER, "global step", 0, *steps))
    places += [
        PlaceDifference(n, *place, one[n].hex(), other[m].hex())
        for place, n, m in both
        if one[n] != other[m]
    ]
    alone = [
        PlaceDifference(n, *key[0], one[n].hex(), None)
        for key, n in ours.items()
        if key not in theirs
    ]
    alone += [
        PlaceDifference(n, *key[0], None, other[n].hex())
        for key, n in theirs.items()
        if key not in ours
    ]
    # Steps of thousands of places are compared, and mostly agree, so that the places by kind are
    # counted only for those that differ.
    found = Counter(place.kind for place in places)
    sizes = Counter(place[0] for place, _, _ in both) if places else found
    return Divergence(
        where=describe_record(actual),
        moment="batch",
        epoch=expected.epoch,
        step=actual.step,
        batch=expected.batch,
        places=places,
        count=len(places),
        compared=len(both) + (expected.step != actual.step),
        by_kind={kind: (count, max(count, sizes[kind])) for kind, count in found.items()},
        one_sided=alone,
    )


# A training has few layouts.
@lru_cache(maxsize=4)
def _number_places(layouts: tuple[tuple[ProbeKey, ...], ...]) -> Mapping[tuple[ProbeKey, int], int]:
    """Return the index of each place by (place, how often the batch has it before)."""
    seen: Counter[ProbeKey] = Counter()
    numbers: dict[tuple[ProbeKey, int], int] = {}
    for place in chain.from_iterable(layouts):
        numbers[place, seen[place]] = len(numbers)
        seen[place] += 1
    return numbers
