"""Compare two ledgers as streams: differences in stack and settings, then divergences."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeAlias

from lightning_d9m.comparison.alignment import align_records
from lightning_d9m.comparison.probe_diff import BatchComparison, PlaceDifference, compare_batches
from lightning_d9m.comparison.record_diff import (
    FieldDifference,
    RecordDifference,
    batch_difference,
    header_refusals,
    list_entries,
    name_call,
    record_difference,
    run_refusals,
    setting_differences,
)
from lightning_d9m.comparison.result import (
    PLACES_KEPT,
    Comparison,
    Divergence,
    OneSided,
    RankComparison,
)
from lightning_d9m.ledger.folder import Ledger
from lightning_d9m.ledger.format.frames import Batch, Frames
from lightning_d9m.ledger.format.reader import RankReader
from lightning_d9m.ledger.format.records import Digests, Header, RunFacts
from lightning_d9m.ledger.keys import Item, describe_record
from lightning_d9m.ledger.resumed_runs import LineageReader
from lightning_d9m.ledger.stack import are_portable, same_logical_ranks, stack_differences
from lightning_d9m.text import escape

__all__ = [
    "Comparison",
    "Divergence",
    "OneSided",
    "RankComparison",
    "RecordObserver",
    "compare_ledgers",
    "first_divergences",
]

_TICK = 2**16


RecordObserver: TypeAlias = Callable[[int, Item | None, Item | None, BatchComparison | None], None]


def first_divergences(expected: Ledger, actual: Ledger) -> list[Divergence]:
    """Return the first divergence of each rank that has one, the earliest first.

    Within a rank the order of execution decides: the order of the records in the file, and within a
    batch the order of the places in the earlier run. A place that only one run has is not a
    divergence; it is counted in ``RankComparison`` and listed in ``Divergence.one_sided``.

    An empty list does not mean that the runs are equal: they may be incomparable, or one may end
    early. ``compare_ledgers(...).verdict`` tells these apart; the comparison also has these
    divergences.

    Raises:
        LedgerError: If a record of either is malformed or was edited.
    """
    return compare_ledgers(expected, actual).divergences


def compare_ledgers(
    expected: Ledger,
    actual: Ledger,
    *,
    progress: Callable[[int], None] | None = None,
    watch: RecordObserver | None = None,
) -> Comparison:
    """Compare two ledgers rank by rank.

    Records are paired by kind, moment, epoch, step and name, so runs that stop at different epochs
    or record different things are compared in what they have in common. With the same logical
    ranks, runs on different numbers of processes are compared on the ranks that both have.

    Args:
        expected: The earlier run.
        actual: The later run.
        progress: Called from time to time with the number of records and places compared so far.
        watch: Called for each pair with (rank, record, its counterpart, comparison of the batch's
            probes). The counterpart is None if only one run has the record. Equal records are one
            object; equal probes of several batches come as ``Frames``.

    Raises:
        LedgerError: If a record of either is malformed or was edited.
    """
    common = [rank for rank in expected.files if rank in actual.files]
    headers: list[tuple[tuple[int, ...], Header, Header]]
    headers = [((rank,), expected.headers[rank], actual.headers[rank]) for rank in common]
    stack: list[FieldDifference] = []
    settings: list[FieldDifference] = []
    refusals: list[FieldDifference] = []
    for where, one, other in headers or [((), expected.header, actual.header)]:
        found = [FieldDifference(*entry) for entry in stack_differences(one.stack, other.stack)]
        stack += _on_ranks(found, where)
        settings += _on_ranks(setting_differences(one, other), where)
        refusals += _on_ranks(header_refusals(one, other), where)
    any_processes = same_logical_ranks(expected.header.stack, actual.header.stack)
    same_size = expected.header.world_size == actual.header.world_size
    ranks: list[RankComparison] = []
    for rank in common if not refusals else ():
        done = sum(entry.records + entry.places for entry in ranks)
        with expected.open(rank) as one_file, actual.open(rank) as other_file:

            def tick(records: int, done: int = done) -> None:
                if progress is not None:
                    progress(done + records)

            files = (one_file, other_file)
            comparison, found_in_run = _compare_rank(rank, files, tick, watch, probes=same_size)
        ranks.append(comparison)
        refusals += _on_ranks(found_in_run, (rank,))
    alone = [
        () if any_processes else tuple(rank for rank in one.files if rank not in other.files)
        for one, other in ((expected, actual), (actual, expected))
    ]
    return Comparison(
        expected=expected.path,
        actual=actual.path,
        stack=_merge(stack),
        settings=_merge(settings),
        refusals=_merge(refusals),
        ranks=tuple(ranks),
        ranks_only_expected=alone[0],
        ranks_only_actual=alone[1],
        portable=are_portable(expected.header.settings, actual.header.settings),
        initial_weights=None if same_size or any_processes else _compare_initial(expected, actual),
    )


def _compare_initial(*ledgers: Ledger) -> tuple[str, ...] | None:
    """Return the names of the weights that differ before the first step, in order."""
    found: list[Mapping[str, str]] = []
    for ledger in ledgers:
        records = ledger.line_records(min(ledger.files))
        first = next((record for record in records if isinstance(record, Digests)), None)
        if first is None or first.moment != "initial" or not first.groups.get("weights"):
            return None
        found.append(first.groups["weights"])
    one, other = found
    return tuple(name for name in {**one, **other} if one.get(name) != other.get(name))


def _on_ranks(found: Iterable[FieldDifference], ranks: tuple[int, ...]) -> list[FieldDifference]:
    return [FieldDifference(f.field, f.expected, f.actual, ranks) for f in found]


def _merge(found: Iterable[FieldDifference]) -> tuple[FieldDifference, ...]:
    """Merge fields that differ in the same way on several ranks."""
    merged: dict[tuple[str, str], FieldDifference] = {}
    for entry in found:
        key = (entry.field, repr((entry.expected, entry.actual)))
        ranks = (*merged[key].ranks, *entry.ranks) if key in merged else entry.ranks
        merged[key] = FieldDifference(entry.field, entry.expected, entry.actual, ranks)
    return tuple(merged.values())


@dataclass(slots=True)
class _Tally:
    """The comparison of one rank's files so far.

    Attributes:
        found: The counts.
        refusals: What makes the runs incomparable.
        batch: The last batch that was counted.
        differing_batch: The last batch that was counted as differing.
    """

    found: RankComparison
    refusals: list[FieldDifference] = field(default_factory=list)
    batch: tuple[int, int] = (-1, -1)
    differing_batch: tuple[int, int] = (-1, -1)

    def count(self, one: Item, other: Item) -> BatchComparison | None:
        """Count two counterparts and their differences."""
        found = self.found
        if isinstance(other, Batch | Frames):
            return self._count_batch(one, other)
        found.records += 1
        if isinstance(other, Digests):
            found.digests += 1
            found.epochs += other.moment == "epoch"
        if one is other or isinstance(one, Batch | Frames):
            return None
        if isinstance(one, RunFacts) and isinstance(other, RunFacts):
            self.refusals = run_refusals(one, other)
        elif (difference := record_difference(one, other)) is not None:
            found.differing += 1
            self._note(difference.by_group)
            if found.first is None:
                found.first = difference
                found.divergence = _at_record(found.rank, difference, list_entries(one, other))
        return None

    def leave_out(self, probes: Batch | Frames) -> None:
        """Count batches whose probes are not compared."""
        self.found.uncompared_batches += self._enter(probes)

    def count_alone(self, side: str, count: int, first: str) -> None:
        """Count what only one run has."""
        known: OneSided = getattr(self.found, side)
        setattr(self.found, side, OneSided(known.count + count, known.first or first))

    def _note(self, groups: Iterable[str]) -> None:
        """Note groups in which something differs."""
        if self.found.trained_alike:
            self.found.groups = tuple(dict.fromkeys((*self.found.groups, *groups)))

    def _enter(self, probes: Batch | Frames) -> int:
        """Return how many batches begin with some probes."""
        known, self.batch = self.batch, (probes.epoch, probes.batch)
        count = int(self.batch != known)
        if isinstance(probes, Frames):
            count += probes.count - 1
            self.batch = (probes.epoch, probes.batch + probes.batches * (probes.count - 1))
        return count

    def _count_batch(self, one: Item, other: Batch | Frames) -> BatchComparison | None:
        found = self.found
        found.batches += self._enter(other)
        if one is other:
            found.places += other.size
            return None
        assert isinstance(one, Batch) and isinstance(other, Batch), "frames come if equal"  # noqa: PT018
        compared = compare_batches(one, other)
        found.places += compared.places
        for side in ("only_expected", "only_actual"):
            if places := getattr(compared, side):
                name = f"{places[0].kind} {name_call(places[0].name, places[0].call)}"
                where = f"{escape(name)} in {describe_record(other)}"
                self.count_alone(f"{side}_places", len(places), where)
        if compared.count:
            found.differing_batches += self.batch != self.differing_batch
            self.differing_batch = self.batch
            found.differing_places += compared.count
            self._note(place.kind for place in compared.differing)
            if found.first is None:
                found.first = batch_difference(compared, describe_record(other))
                found.divergence = _at_place(found.rank, compared)
        return compared


def _at_place(rank: int, found: BatchComparison) -> Divergence:
    return Divergence.at_places(
        found.differing,
        rank=rank,
        moment="batch",
        epoch=found.epoch,
        step=found.step,
        batch=found.batch,
        count=found.count,
        compared=found.places,
        one_sided=(*found.only_expected[:PLACES_KEPT], *found.only_actual[:PLACES_KEPT]),
    )


def _at_record(
    rank: int, found: RecordDifference, entries: Iterable[PlaceDifference]
) -> Divergence:
    return Divergence.at_places(
        list(islice(entries, PLACES_KEPT)),
        rank=rank,
        moment=found.moment,
        epoch=found.epoch,
        step=found.step,
        batch=None,
        count=found.count,
        compared=found.total,
    )


def _compare_rank(
    rank: int,
    files: tuple[RankReader, RankReader],
    progress: Callable[[int], None],
    watch: RecordObserver | None,
    *,
    probes: bool,
) -> tuple[RankComparison, list[FieldDifference]]:
    """Compare two files; stop if they are incomparable."""
    result = RankComparison(rank)
    tally = _Tally(result)
    ticked = 0
    for one, other in align_records(*files):
        found = None
        item = other if one is None else one
        if not probes and isinstance(item, Batch | Frames):
            tally.leave_out(item)
            continue
        if one is not None and other is not None:
            found = tally.count(one, other)
            if tally.refusals:
                break
        elif one is not None:
            tally.count_alone("only_expected", 1, describe_record(one))
        elif other is not None:
            tally.count_alone("only_actual", 1, describe_record(other))
        if watch is not None:
            watch(rank, one, other, found)
        done = result.records + result.places
        if done - ticked > _TICK:
            ticked = done
            progress(done)
    result.expected_complete, result.actual_complete = (file.complete for file in files)
    result.expected_truncated, result.actual_truncated = (file.truncated for file in files)
    result.expected_breaks, result.actual_breaks = (
        tuple(file.breaks) if isinstance(file, LineageReader) else () for file in files
    )
    return result, tally.refusals
