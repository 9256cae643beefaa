"""Compare two ledgers as streams: what differs in stack and settings, then where they diverge."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

from lightning_d9m.evidence.alignment import align_records, describe_record
from lightning_d9m.evidence.difference import (
    Difference,
    FieldDifference,
    header_refusals,
    record_difference,
    run_refusals,
    setting_differences,
)
from lightning_d9m.evidence.ledger import Ledger
from lightning_d9m.evidence.rank_file import RankReader
from lightning_d9m.evidence.records import Digests, End, Header, Record, RunFacts
from lightning_d9m.evidence.stack import stack_differences

_TICK_MASK = 2**16 - 1


@dataclass(frozen=True, slots=True)
class OneSided:
    """Records that only one of two runs has.

    Attributes:
        count: Their number.
        first: The first of them, in words; empty when there is none.
    """

    count: int
    first: str


@dataclass(frozen=True, slots=True)
class RankComparison:
    """How one rank's files compare.

    Attributes:
        rank: The rank.
        records: Number of pairs of records that were compared.
        digests: How many of these hold digests of the training's state.
        epochs: How many of these are the end of an epoch.
        differing: How many pairs differ.
        first: The first divergence; None when all pairs agree.
        only_expected: Records that only the earlier run has.
        only_actual: Records that only the later run has.
        expected_complete: Whether the earlier run wrote its last record; a killed one does not.
        actual_complete: Whether the later run did.
        expected_truncated: Whether the earlier run's last record is torn, and was left out.
        actual_truncated: Whether the later run's is.
    """

    rank: int
    records: int
    digests: int
    epochs: int
    differing: int
    first: Difference | None
    only_expected: OneSided
    only_actual: OneSided
    expected_complete: bool
    actual_complete: bool
    expected_truncated: bool
    actual_truncated: bool

    @property
    def equal(self) -> bool:
        """Whether both files hold the same evidence."""
        return not (self.differing or self.only_expected.count or self.only_actual.count)


@dataclass(frozen=True, slots=True)
class Comparison:
    """How two ledgers compare.

    Attributes:
        expected: The earlier run's ledger.
        actual: The later run's ledger.
        stack: Fields in which the stacks differ.
        settings: Settings that differ and leave the runs comparable.
        refusals: What makes the runs incomparable: another seed, model, dataset, world size, ...
        ranks: One entry for each rank that both ledgers have; empty when there are refusals that
            the headers show.
        ranks_only_expected: Ranks that only the earlier ledger has.
        ranks_only_actual: Ranks that only the later ledger has.
    """

    expected: Path
    actual: Path
    stack: tuple[FieldDifference, ...]
    settings: tuple[FieldDifference, ...]
    refusals: tuple[FieldDifference, ...]
    ranks: tuple[RankComparison, ...]
    ranks_only_expected: tuple[int, ...]
    ranks_only_actual: tuple[int, ...]

    @property
    def verdict(self) -> Literal["equal", "different", "not comparable"]:
        """``"equal"`` only when something was compared and no record differs or is missing."""
        if self.refusals or not self.ranks:
            return "not comparable"
        whole = not (self.ranks_only_expected or self.ranks_only_actual)
        if not whole or not all(rank.equal for rank in self.ranks):
            return "different"
        # Where nothing differs because no digest was there to compare, nothing is proven.
        return "equal" if all(rank.digests for rank in self.ranks) else "not comparable"

    @property
    def equal(self) -> bool:
        """Whether the runs are proven to agree bit for bit."""
        return self.verdict == "equal"

    @property
    def first(self) -> tuple[int, Difference] | None:
        """The rank that diverges first, and how; of several in one step, the lowest."""
        found = [(rank.rank, rank.first) for rank in self.ranks if rank.first is not None]
        return min(found, key=lambda entry: (entry[1].epoch, entry[1].step), default=None)


def compare_ledgers(
    expected: Ledger, actual: Ledger, *, progress: Callable[[int], None] | None = None
) -> Comparison:
    """Compare two ledgers rank by rank.

    Records find their counterparts by kind, moment, epoch, step and name, so that runs that stop
    at another epoch, or that record other things, are compared in what they have in common.

    Args:
        expected: The earlier run.
        actual: The later run.
        progress: Called now and then with the number of records that were compared so far.

    Raises:
        LedgerError: When a record of either is malformed or was edited.
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
    ranks: list[RankComparison] = []
    for rank in common if not refusals else ():
        done = sum(entry.records for entry in ranks)
        with expected.open(rank) as one_file, actual.open(rank) as other_file:
            tick = partial(_report, progress, done)
            comparison, found_in_run = _compare_rank(rank, one_file, other_file, tick)
        ranks.append(comparison)
        refusals += _on_ranks(found_in_run, (rank,))
    return Comparison(
        expected=expected.path,
        actual=actual.path,
        stack=_merge(stack),
        settings=_merge(settings),
        refusals=_merge(refusals),
        ranks=tuple(ranks),
        ranks_only_expected=tuple(rank for rank in expected.files if rank not in actual.files),
        ranks_only_actual=tuple(rank for rank in actual.files if rank not in expected.files),
    )


def _report(progress: Callable[[int], None] | None, done: int, records: int) -> None:
    if progress is not None:
        progress(done + records)


def _on_ranks(found: Iterable[FieldDifference], ranks: tuple[int, ...]) -> list[FieldDifference]:
    return [FieldDifference(f.field, f.expected, f.actual, ranks) for f in found]


def _merge(found: Iterable[FieldDifference]) -> tuple[FieldDifference, ...]:
    """Name once what differs in the same way on several ranks."""
    merged: dict[tuple[str, str], FieldDifference] = {}
    for entry in found:
        key = (entry.field, repr((entry.expected, entry.actual)))
        ranks = (*merged[key].ranks, *entry.ranks) if key in merged else entry.ranks
        merged[key] = FieldDifference(entry.field, entry.expected, entry.actual, ranks)
    return tuple(merged.values())


@dataclass(slots=True)
class _Tally:
    """What the comparison of one rank's files has found so far."""

    records: int = 0
    digests: int = 0
    epochs: int = 0
    differing: int = 0
    first: Difference | None = None
    refusals: list[FieldDifference] = field(default_factory=list)

    def count(self, one: Record, other: Record) -> None:
        """Count two counterparts, and how they differ."""
        self.records += 1
        if isinstance(one, Digests):
            self.digests += 1
            self.epochs += one.moment == "epoch"
        if one is other:
            return
        if isinstance(one, RunFacts) and isinstance(other, RunFacts):
            self.refusals = run_refusals(one, other)
        elif self.first is None or isinstance(one, End):
            difference = record_difference(one, other)
            self.differing += difference is not None
            self.first = self.first or difference
        else:
            # Only the first is described: after it most records differ, and that takes time.
            self.differing += one != other


def _compare_rank(
    rank: int, expected: RankReader, actual: RankReader, progress: Callable[[int], None]
) -> tuple[RankComparison, list[FieldDifference]]:
    """Compare two files; stop where they turn out to be incomparable."""
    tally = _Tally()
    only_expected, only_actual = OneSided(0, ""), OneSided(0, "")
    for one, other in align_records(expected, actual):
        if one is not None and other is not None:
            tally.count(one, other)
            if tally.refusals:
                break
        elif one is not None:
            only_expected = _add(only_expected, one)
        elif other is not None:
            only_actual = _add(only_actual, other)
        else:
            tally.records += 1
        if not tally.records & _TICK_MASK:
            progress(tally.records)
    comparison = RankComparison(
        rank=rank,
        records=tally.records,
        digests=tally.digests,
        epochs=tally.epochs,
        differing=tally.differing,
        first=tally.first,
        only_expected=only_expected,
        only_actual=only_actual,
        expected_complete=expected.complete,
        actual_complete=actual.complete,
        expected_truncated=expected.truncated,
        actual_truncated=actual.truncated,
    )
    return comparison, tally.refusals


def _add(found: OneSided, record: Record) -> OneSided:
    return OneSided(found.count + 1, found.first or describe_record(record))
