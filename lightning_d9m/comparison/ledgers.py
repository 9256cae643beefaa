"""Compare two ledgers as streams: differences in stack and settings, then divergences."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import TypeAlias

from lightning_d9m.comparison.alignment import align_records
from lightning_d9m.comparison.frame_diff import find_differences
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
from lightning_d9m.ledger.format.probe_frames import Frames
from lightning_d9m.ledger.format.reader import RankReader
from lightning_d9m.ledger.format.records import Digests, End, Header, RunFacts
from lightning_d9m.ledger.keys import Item, describe_record
from lightning_d9m.ledger.probe_batch import Batch
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
_Probes = (Batch, Frames)
_LOGGED = frozenset({"scalar", "scalars"})


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
            object. Equal records of an unknown kind are passed as None twice.

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
            tick = partial(_report, progress, done)
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


def _compare_initial(expected: Ledger, actual: Ledger) -> tuple[str, ...] | None:
    """Return the names of the weights that differ before the first step, in order."""
    first, other = (_read_initial(ledger) for ledger in (expected, actual))
    if not first or not other:
        return None
    return tuple(name for name in {**first, **other} if first.get(name) != other.get(name))


def _read_initial(ledger: Ledger) -> Mapping[str, str]:
    for record in ledger.line_records(min(ledger.files)):
        if isinstance(record, Digests):
            return record.groups.get("weights", {}) if record.moment == "initial" else {}
    return {}


def _report(progress: Callable[[int], None] | None, done: int, records: int) -> None:
    if progress is not None:
        progress(done + records)


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
        watched: Whether an observer gets the places that differ.
        refusals: What makes the runs incomparable.
        batch: The last batch that was counted.
        differing_batch: The last batch that was counted as differing.
    """

    found: RankComparison
    watched: bool
    refusals: list[FieldDifference] = field(default_factory=list)
    batch: tuple[int, int] = (-1, -1)
    differing_batch: tuple[int, int] = (-1, -1)

    def count(self, one: Item, other: Item) -> BatchComparison | None:
        """Count two counterparts and their differences."""
        if isinstance(one, Batch) and isinstance(other, Batch):
            return self._count_batch(one, other)
        if isinstance(one, Frames) and isinstance(other, Frames):
            self._count_frames(one, other)
            return None
        found = self.found
        found.records += 1
        if isinstance(one, Digests):
            found.digests += 1
            found.epochs += one.moment == "epoch"
        if one is other or isinstance(one, _Probes) or isinstance(other, _Probes):
            return None
        if isinstance(one, RunFacts) and isinstance(other, RunFacts):
            self.refusals = run_refusals(one, other)
        elif found.only_logged or isinstance(one, End):
            difference = record_difference(one, other)
            found.differing += difference is not None
            found.only_logged &= difference is None or difference.by_group.keys() <= _LOGGED
            if difference is not None and found.first is None:
                found.first = difference
                found.divergence = _at_record(found.rank, difference, list_entries(one, other))
        else:
            # After a first difference most records differ; how is of no interest.
            found.differing += one != other
        return None

    def leave_out(self, batch: Batch) -> None:
        """Count a batch whose probes are not compared."""
        number = (batch.epoch, batch.batch)
        self.found.uncompared_batches += number != self.batch
        self.batch = number

    def count_alone(self, side: str, count: int, first: str) -> None:
        """Count what only one run has."""
        known: OneSided = getattr(self.found, side)
        setattr(self.found, side, OneSided(known.count + count, known.first or first))

    def _count_frames(self, one: Frames, other: Frames) -> None:
        """Count frames of the same batches and places."""
        self.found.batches += one.count - ((one.epoch, one.batch) == self.batch)
        self.batch = (one.epoch, one.last_batch)
        self.found.places += one.size
        if one is other:
            return
        frames = find_differences(one, other)
        self.found.only_logged = False  # as long as it is True, frames come as batches
        first, last = (one.batch + one.batches * number for number in (frames.first, frames.last))
        self.found.differing_places += frames.places
        self.found.differing_batches += frames.frames - ((one.epoch, first) == self.differing_batch)
        self.differing_batch = (one.epoch, last)

    def _count_batch(self, one: Batch, other: Batch) -> BatchComparison | None:
        number, found = (one.epoch, one.batch), self.found
        found.batches += number != self.batch
        self.batch = number
        if one is other:
            found.places += one.size
            return None
        # Once the training differs, places are listed only for an observer.
        compared = compare_batches(one, other, listed=self.watched or found.only_logged)
        found.places += compared.places
        where = describe_record(other)
        for side in ("only_expected", "only_actual"):
            if places := getattr(compared, side):
                name = f"{places[0].kind} {name_call(places[0].name, places[0].call)}"
                self.count_alone(f"{side}_places", len(places), f"{escape(name)} in {where}")
        if compared.count:
            found.differing_batches += number != self.differing_batch
            self.differing_batch = number
            found.differing_places += compared.count
            found.only_logged &= compared.by_kind.keys() <= _LOGGED
            if found.first is None:
                found.first = batch_difference(compared, where)
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
    return Divergence(
        rank=rank,
        moment=found.moment,
        epoch=found.epoch,
        step=found.step,
        batch=None,
        kind=found.group,
        name=found.names[0],
        call=0,
        position=0,
        expected=found.expected,
        actual=found.actual,
        places=tuple(islice(entries, PLACES_KEPT)),
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
    tally = _Tally(result, watched=watch is not None)
    ticked = 0
    # Only what comes before is described: after it most records differ.
    records = align_records(*files, whole=watch is not None, named=lambda: result.only_logged)
    for one, other in records:
        found = None
        batch = other if one is None else one
        if not probes and isinstance(batch, Batch):
            tally.leave_out(batch)
            continue
        if one is not None and other is not None:
            found = tally.count(one, other)
            if tally.refusals:
                break
        elif one is not None:
            tally.count_alone("only_expected", 1, describe_record(one))
        elif other is not None:
            tally.count_alone("only_actual", 1, describe_record(other))
        else:
            result.records += 1
        if watch is not None:
            watch(rank, one, other, found)
        done = result.records + result.places
        if done - ticked > _TICK:
            ticked = done
            progress(done)
    result.expected_complete, result.actual_complete = (file.complete for file in files)
    result.expected_truncated, result.actual_truncated = (file.truncated for file in files)
    result.expected_breaks, result.actual_breaks = (
        file.breaks if isinstance(file, LineageReader) else () for file in files
    )
    return result, tally.refusals
