"""The differences between two records, for the check in a run and the comparison of ledgers."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from lightning_d9m.comparison.probe_diff import BatchComparison, PlaceDifference
from lightning_d9m.ledger.format.entry import Mark, describe_fields
from lightning_d9m.ledger.format.fields import Json
from lightning_d9m.ledger.format.records import Digests, Header, Opaque, Record, RunFacts
from lightning_d9m.ledger.keys import describe_record
from lightning_d9m.ledger.stack import same_logical_ranks
from lightning_d9m.ledger.tables import MISSING, TableValue, table_differences
from lightning_d9m.text import cut_digests

Table: TypeAlias = Mapping[str, Json]

NAMES_KEPT = 10
_TOTAL = "(total)"
_MAX_PATH_CHARACTERS = 2**26
GROUPS = ("weights", "buffers", "optimizers", "schedulers")

# Settings in which two comparable runs may differ, each with the reason.
INFORMATIONAL_SETTINGS = {
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


@dataclass(frozen=True, slots=True)
class RecordDifference:
    """The difference between a record and its counterpart.

    Attributes:
        kind: Kind of the record.
        where: Description of the record, for people.
        moment: When it was taken; empty for kinds without a moment.
        epoch: Counted from 0.
        step: The global step in the later run.
        group: The first group that differs, in the order weights, buffers, optimizers, schedulers,
            loss, scalars, step.
        names: The first names that differ in that group, at most ``NAMES_KEPT``.
        count: Number of entries that differ, in all groups.
        total: Number of entries that were compared.
        by_group: (entries that differ, entries) for each group in which some differ.
        expected: The value of the first of ``names`` in the earlier run.
        actual: The same in the later run.
    """

    kind: str
    where: str
    moment: str
    epoch: int
    step: int
    group: str
    names: tuple[str, ...]
    count: int
    total: int
    expected: str
    actual: str
    by_group: Mapping[str, tuple[int, int]] = field(default_factory=dict)


def header_refusals(expected: Header, actual: Header) -> list[FieldDifference]:
    """Return the fields of two headers that make their runs incomparable."""
    names = ["seed", "fit", "world_size"]
    if same_logical_ranks(expected.stack, actual.stack):
        names.remove("world_size")
    fields = [
        FieldDifference(name, getattr(expected, name), getattr(actual, name))
        for name in names
        if getattr(expected, name) != getattr(actual, name)
    ]
    settings = table_differences(expected.settings, actual.settings)
    return fields + [
        FieldDifference(f"settings.{name}", *values)
        for name, *values in settings
        if name not in INFORMATIONAL_SETTINGS
    ]


def setting_differences(expected: Header, actual: Header) -> list[FieldDifference]:
    """Return the settings that differ without making the runs incomparable."""
    settings = table_differences(expected.settings, actual.settings)
    return [
        FieldDifference(*entry)
        for entry in settings
        if entry[0] in INFORMATIONAL_SETTINGS and entry[0] != "seed"
    ]


def run_refusals(expected: RunFacts, actual: RunFacts) -> list[FieldDifference]:
    """Return the facts that make two runs incomparable: model, data, the Trainer's arithmetic."""
    tables = [_run_table(facts) for facts in (expected, actual)]
    differing = {name: values for name, *values in table_differences(*tables)}
    order = {name: number for number, name in enumerate(tables[0])}
    return [
        FieldDifference(name, *differing[name])
        for name in sorted(differing, key=lambda name: order.get(name, len(order)))
    ]


def _run_table(facts: RunFacts) -> dict[str, Json]:
    """Return the facts by the names under which differences are reported, causes first."""
    table: dict[str, Json] = {"model": f"{facts.model} ({facts.parameters} parameters)"}
    for name, unit in (
        ("samples", "samples"),
        ("batch_size", "samples a batch"),
        ("batches", "batches an epoch"),
    ):
        # In one value, so that a different number of dataloaders shows too.
        values = [getattr(loader, name) for loader in facts.train]
        counted = " + ".join("unknown" if value is None else str(value) for value in values)
        table["dataset" if name == "samples" else name] = f"{counted or 'no'} {unit}"
    table |= {f"trainer.{name}": value for name, value in facts.trainer.items()}
    unknown = {f"train.{number}": loader.extra for number, loader in enumerate(facts.train)}
    unknown = {name: extra for name, extra in unknown.items() if extra}
    for extra in (unknown, facts.extra):
        for path, leaf in _flatten(extra).items():
            _add_leaf(table, path, leaf)
    return table


def record_difference(expected: Record, actual: Record) -> RecordDifference | None:
    """Return how two records with the same key differ; None if their contents are equal."""
    by_group: dict[str, tuple[int, int]] = {}
    first: tuple[str, list[TableValue]] | None = None
    total = 0
    for group, size, named in _differing(expected, actual):
        total += size
        if named:
            by_group[group] = (len(named), size)
            first = first or (group, named)
    if first is None:
        return None
    group, named = first
    fields = actual.as_record()
    epoch, step = fields.get("epoch"), fields.get("step")
    return RecordDifference(
        kind=str(fields["kind"]),
        where=describe_record(actual),
        moment=actual.moment if isinstance(actual, Digests) else "",
        epoch=epoch if isinstance(epoch, int) else 0,
        step=step if isinstance(step, int) else 0,
        group=group,
        names=tuple(name for name, _, _ in named[:NAMES_KEPT]),
        count=sum(count for count, _ in by_group.values()),
        total=total,
        expected=str(named[0][1]),
        actual=str(named[0][2]),
        by_group=by_group,
    )


def list_entries(expected: Record, actual: Record) -> Iterator[PlaceDifference]:
    """Yield each entry in which two records with the same key differ, group by group."""
    differing = (
        (group, *entry) for group, _, named in _differing(expected, actual) for entry in named
    )
    for number, (group, name, *values) in enumerate(differing):
        one, other = (None if value is MISSING else str(value) for value in values)
        yield PlaceDifference(number, group, name, 0, one, other)


def batch_difference(found: BatchComparison, where: str) -> RecordDifference | None:
    """Return how the probes of a batch differ; None if those in common are equal."""
    if not found.differing:
        return None
    first = found.differing[0]
    same_kind = [entry for entry in found.differing if entry.kind == first.kind]
    return RecordDifference(
        kind="probes",
        where=where,
        moment="",
        epoch=found.epoch,
        step=found.step,
        group=first.kind,
        names=tuple(name_call(entry.name, entry.call) for entry in same_kind[:NAMES_KEPT]),
        count=found.count,
        total=found.places,
        expected=str(first.expected),
        actual=str(first.actual),
        by_group=found.by_kind,
    )


def name_call(name: str, call: int) -> str:
    """Return the name of a place, with the number of the call unless it is the first.

    >>> name_call("encoder", 0), name_call("encoder", 2)
    ('encoder', 'encoder (call 2)')
    """
    return f"{name} (call {call})" if call else name


def _comparable_fields(record: Record) -> dict[str, Json]:
    """Return every leaf of a record but of the fields that are for people only."""
    fields = record.as_record()
    for part in () if isinstance(record, Opaque) else describe_fields(type(record)):
        if Mark.INFORMATIONAL in part.marks:
            fields.pop(part.name, None)
    return _flatten(fields)


def _flatten(table: Mapping[str, Json]) -> dict[str, Json]:
    """Return the leaves of nested tables and lists by dotted path; none stands in for another.

    If their paths need too much memory, the top-level entries are the leaves, as JSON.
    """
    leaves: dict[str, Json] = {}
    characters = 0
    for name, entry in table.items():
        for path, leaf in _leaves(entry, name):
            _add_leaf(leaves, path, leaf)
            characters += len(path)
            if characters > _MAX_PATH_CHARACTERS:
                return {key: json.dumps(value, sort_keys=True) for key, value in table.items()}
    return leaves


def _add_leaf(leaves: dict[str, Json], path: str, leaf: Json) -> None:
    """Add a leaf under a path that no other has: a dot in a name may look like a nested one."""
    while path in leaves:
        path += "."
    leaves[path] = leaf


def _leaves(value: Json, path: str) -> Iterator[tuple[str, Json]]:
    """Yield (path, leaf); three times as fast for a record as ``list_pytree_leaves``."""
    if isinstance(value, dict | list) and value:
        entries = value.items() if isinstance(value, dict) else enumerate(value)
        for name, entry in entries:
            yield from _leaves(entry, f"{path}.{name}")
    else:
        yield path, value


def _differing(expected: Record, actual: Record) -> Iterator[tuple[str, int, list[TableValue]]]:
    """Yield each group with the number of its entries and the entries that differ.

    Entries keep the order of the earlier run, which is the order of the model.
    """
    for group, (one, other) in _tables(expected, actual).items():
        entries = one.keys() | other.keys()
        differing = table_differences(one, other)
        # A group's total differs whenever an entry does, so it is listed only if nothing else is.
        named = [entry for entry in differing if entry[0] != _TOTAL] or differing
        if named[1:]:
            order = {name: number for number, name in enumerate(one)}
            named.sort(key=lambda entry: order.get(entry[0], len(order)))
        yield group, len(entries) - (_TOTAL in entries and len(entries) > 1), named


def _tables(expected: Record, actual: Record) -> dict[str, tuple[Table, Table]]:
    """Return the contents of two records by group."""
    if not isinstance(expected, Digests) or not isinstance(actual, Digests):
        fields = [_comparable_fields(record) for record in (expected, actual)]
        return {str(fields[0]["kind"]): (fields[0], fields[1])}
    tables: dict[str, tuple[Table, Table]] = {}
    named = list(GROUPS)
    for record in (expected, actual):
        named += [group for group in (*record.groups, *record.totals) if group not in named]
    for group in named:
        tables[group] = _group_tables(expected, actual, group)
    losses = [{} if r.loss is None else {"loss": r.loss} for r in (expected, actual)]
    tables["loss"] = (losses[0], losses[1])
    tables["scalars"] = (expected.scalars, actual.scalars)
    tables["step"] = ({"global step": str(expected.step)}, {"global step": str(actual.step)})
    extras = [_flatten(record.extra) for record in (expected, actual)]
    tables["other fields"] = (extras[0], extras[1])
    return tables


def _group_tables(expected: Digests, actual: Digests, group: str) -> tuple[Table, Table]:
    """Return the digests of a group in both records; only totals if one record has no names."""
    unnamed = (group in expected.groups) != (group in actual.groups)
    totals_only = unnamed and group in expected.totals and group in actual.totals
    one, other = (
        {} if totals_only else dict(record.groups.get(group, {})) for record in (expected, actual)
    )
    totals = expected.totals.get(group), actual.totals.get(group)
    if one or other or group not in expected.groups or totals[0] != totals[1]:
        for table, total in zip((one, other), totals, strict=True):
            if total is not None:
                table[_TOTAL] = total
    return one, other
