"""Compare two ledgers as streams: differences in stack and settings, then divergences."""

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal, TypeAlias

from lightning_d9m.comparison.alignment import align_records
from lightning_d9m.comparison.differences import (
    Divergence,
    FieldDifference,
    batch_difference,
    header_refusals,
    name_call,
    record_difference,
    run_refusals,
    setting_differences,
)
from lightning_d9m.ledger.folder import Ledger, read_ledger
from lightning_d9m.ledger.format.frames import Batch
from lightning_d9m.ledger.format.reader import RankReader
from lightning_d9m.ledger.format.records import Digests, Header, RunFacts
from lightning_d9m.ledger.keys import Item, describe_record
from lightning_d9m.ledger.resumed_runs import Break, LineageReader
from lightning_d9m.ledger.stack import are_portable, same_logical_ranks, stack_differences
from lightning_d9m.text import escape

# Groups of digests and kinds of probes and records that hold logged values, and evaluations.
LOGGED = frozenset({"scalar", "scalars"})
EVALUATED = LOGGED | {"evaluation"}
_TICK = 2**16

RecordObserver: TypeAlias = Callable[[int, Item | None, Item | None, Divergence | None], None]


@dataclass(frozen=True, slots=True)
class OneSided:
    """Records that only one of two runs has.

    Attributes:
        count: Their number.
        first: Description of the first of them; empty if there is none.
    """

    count: int = 0
    first: str = ""

    def add(self, count: int, first: str) -> "OneSided":
        """Return these and further records."""
        return OneSided(self.count + count, self.first or first)


@dataclass(slots=True)
class Side:
    """One of two runs: what only its file of a rank has, and how the file ends.

    Attributes:
        records: Records that the other run does not have.
        places: Places, in batches of both, that the other run does not have.
        complete: Whether the run wrote its last record; a killed run does not.
        truncated: Whether its last record is torn and was skipped.
        breaks: Where the run was interrupted and resumed.
    """

    records: OneSided = OneSided()
    places: OneSided = OneSided()
    complete: bool = False
    truncated: bool = False
    breaks: tuple[Break, ...] = ()

    @property
    def alone(self) -> int:
        """Number of records and places that the other run does not have."""
        return self.records.count + self.places.count

    def as_json(self, name: str) -> dict[str, object]:
        """Return the facts as JSON types, under the name of the run."""
        return {
            f"only_{name}": asdict(self.records),
            f"only_{name}_places": asdict(self.places),
            f"{name}_complete": self.complete,
            f"{name}_truncated": self.truncated,
            f"{name}_breaks": [asdict(one) for one in self.breaks],
        }


@dataclass(slots=True)
class RankComparison:
    """The comparison of one rank's files.

    Attributes:
        rank: The rank.
        records: Number of pairs of records that were compared.
        digests: Number of these that hold digests of the training's state.
        epochs: Number of these that are the end of an epoch.
        differing: Number of pairs that differ.
        expected: What only the earlier run has.
        actual: What only the later run has.
        batches: Number of batches whose probes were compared.
        differing_batches: Number of them that differ.
        uncompared_batches: Number of batches whose probes were not compared, because logical ranks
            ran on different numbers of processes.
        places: Number of places (probes) that were compared.
        differing_places: Number of them that differ.
        groups: The groups of digests, kinds of probes and of records in which something differs, as
            long as no state of the training does.
        divergence: The first divergence; None if all pairs agree.
    """

    rank: int
    records: int = 0
    digests: int = 0
    epochs: int = 0
    differing: int = 0
    expected: Side = field(default_factory=Side)
    actual: Side = field(default_factory=Side)
    batches: int = 0
    differing_batches: int = 0
    uncompared_batches: int = 0
    places: int = 0
    differing_places: int = 0
    groups: tuple[str, ...] = ()
    divergence: Divergence | None = None

    def as_json(self) -> dict[str, object]:
        """Return the comparison as JSON types; the names are those of the attributes."""
        found = self.divergence
        facts = asdict(replace(self, divergence=None)) | {
            "first": None if found is None else found.summarize(),
            "divergence": None if found is None else found.as_json(),
        }
        del facts["expected"], facts["actual"]
        return facts | self.expected.as_json("expected") | self.actual.as_json("actual")

    @property
    def trained_alike(self) -> bool:
        """True if only logged values and evaluations differ."""
        return EVALUATED.issuperset(self.groups)

    @property
    def cut_off(self) -> bool:
        """True if one file is the beginning of the other: its run ended early."""
        both = self.expected.alone and self.actual.alone
        if self.differing or self.differing_places or both:
            return False
        return not (self.actual if self.expected.alone else self.expected).complete

    @property
    def equal(self) -> bool:
        """True if both files have the same contents."""
        differing = self.differing or self.differing_places
        return not (differing or self.expected.alone or self.actual.alone)


@dataclass(frozen=True, slots=True)
class Comparison:
    """The comparison of two ledgers.

    Attributes:
        expected: The earlier run's ledger.
        actual: The later run's ledger.
        stack: Fields in which the stacks differ.
        settings: Settings that differ without making the runs incomparable.
        refusals: Fields that make the runs incomparable: seed, model, dataset, world size, ...
        ranks: One entry for each rank that both ledgers have; empty if the headers alone make the
            runs incomparable.
        ranks_only_expected: Ranks that only the earlier ledger has.
        ranks_only_actual: Ranks that only the later ledger has.
        initial_weights: Of runs on different numbers of processes, which are alike only before the
            first step: the names of the initial weights that differ; None if both do not have them.
        portable: Whether both runs computed portable bits, so that no stack explains a difference.
    """

    expected: Path
    actual: Path
    stack: tuple[FieldDifference, ...]
    settings: tuple[FieldDifference, ...]
    refusals: tuple[FieldDifference, ...]
    ranks: tuple[RankComparison, ...]
    ranks_only_expected: tuple[int, ...]
    ranks_only_actual: tuple[int, ...]
    initial_weights: tuple[str, ...] | None = None
    portable: bool = False

    def as_json(self) -> dict[str, object]:
        """Return the comparison as JSON types; the names are those of the attributes."""
        paths = {"expected": str(self.expected), "actual": str(self.actual)}
        ranks = [rank.as_json() for rank in self.ranks]
        facts = asdict(replace(self, ranks=()))
        return {"verdict": self.verdict, **facts, **paths, "ranks": ranks}

    @property
    def verdict(self) -> Literal["equal", "different", "incomplete", "not comparable"]:
        """``"equal"`` only if something was compared and no record differs or is missing.

        ``"incomplete"`` if one run was ended early and all that it recorded is equal.
        """
        if self.refusals or not self.ranks:
            return "not comparable"
        whole = not (self.ranks_only_expected or self.ranks_only_actual)
        if not whole or not all(rank.equal or rank.cut_off for rank in self.ranks):
            return "different"
        # Without digests to compare, nothing is proven.
        if not all(rank.digests or rank.places for rank in self.ranks):
            return "not comparable"
        return "equal" if all(rank.equal for rank in self.ranks) else "incomplete"

    @property
    def extent(self) -> Literal["logged values", "evaluations", "training"]:
        """The most that differs: the first two only if the runs have the same records."""
        alone = (self.ranks_only_expected, self.ranks_only_actual)
        sides = [side for rank in self.ranks for side in (rank.expected, rank.actual)]
        longer = any(side.records.count for side in sides)
        if any(alone) or longer or not all(rank.trained_alike for rank in self.ranks):
            return "training"
        logged = all(LOGGED.issuperset(rank.groups) for rank in self.ranks)
        return "logged values" if logged else "evaluations"

    @property
    def equal(self) -> bool:
        """True if the ledgers prove that the runs are bit-exact."""
        return self.verdict == "equal"

    @property
    def first(self) -> Divergence | None:
        """The first divergence of the rank that diverges first."""
        return next(iter(self.divergences), None)

    @property
    def divergences(self) -> list[Divergence]:
        """The first divergence of each rank that has one, earliest first.

        Within a rank the order of execution decides: that of the records in the file, and within a
        batch that of the places in the earlier run. Places that only one run has do not count.
        """
        found = [rank.divergence for rank in self.ranks if rank.divergence is not None]
        return sorted(found, key=lambda entry: entry.when)


def compare(
    expected: Ledger | str | os.PathLike[str], actual: Ledger | str | os.PathLike[str]
) -> Comparison:
    """Compare the ledgers of two runs, as ``d9m compare`` does.

    Args:
        expected: The earlier run: a ledger, or the path of one; see ``read_ledger``.
        actual: The later run, likewise.

    Returns:
        The comparison. ``verdict`` is ``"equal"`` only if every record of both runs agrees;
        ``divergences`` holds the first difference of each rank that has one, the earliest first.

    Raises:
        LedgerError: If a ledger cannot be read, or a record is malformed or was edited.
    """
    one, other = (
        run if isinstance(run, Ledger) else read_ledger(run) for run in (expected, actual)
    )
    return compare_ledgers(one, other)


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
        watch: Called for each pair with (rank, record, its counterpart, their difference). The
            counterpart is None if only one run has the record; the difference, if they are equal.
            Equal records are one object.

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

    def count(self, one: Item, other: Item) -> Divergence | None:
        """Count two counterparts and their differences."""
        found = self.found
        if isinstance(other, Batch):
            return self._count_batch(one, other)
        found.records += 1
        if isinstance(other, Digests):
            found.digests += 1
            found.epochs += other.moment == "epoch"
        if one is other or isinstance(one, Batch):
            return None
        if isinstance(one, RunFacts) and isinstance(other, RunFacts):
            self.refusals = run_refusals(one, other)
            return None
        difference = record_difference(one, other)
        if difference is not None:
            found.differing += 1
            self._note(difference)
        return difference

    def leave_out(self, probes: Batch) -> None:
        """Count batches whose probes are not compared."""
        self.found.uncompared_batches += self._enter(probes)

    def _note(self, difference: Divergence) -> None:
        """Note the groups in which something differs, and the first difference."""
        found = self.found
        if found.trained_alike:
            found.groups = tuple(dict.fromkeys((*found.groups, *difference.by_kind)))
        if found.divergence is None:
            found.divergence = difference.keep(found.rank)

    def _enter(self, probes: Batch) -> bool:
        """Return whether a batch begins with some probes."""
        known, self.batch = self.batch, (probes.epoch, probes.batch)
        return self.batch != known

    def _count_batch(self, one: Item, other: Batch) -> Divergence | None:
        found = self.found
        found.batches += self._enter(other)
        if one is other:
            found.places += other.size
            return None
        assert isinstance(one, Batch), "its counterpart is one"
        compared = batch_difference(one, other)
        found.places += compared.compared
        for side, run in ((found.expected, "actual"), (found.actual, "expected")):
            if places := [place for place in compared.one_sided if getattr(place, run) is None]:
                name = f"{places[0].kind} {name_call(places[0].name, places[0].call)}"
                where = f"{escape(name)} in {compared.where}"
                side.places = side.places.add(len(places), where)
        if compared.count:
            found.differing_batches += self.batch != self.differing_batch
            self.differing_batch = self.batch
            found.differing_places += compared.count
            self._note(compared)
        return compared


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
        if not probes and isinstance(item, Batch):
            tally.leave_out(item)
            continue
        if one is not None and other is not None:
            found = tally.count(one, other)
            if tally.refusals:
                break
        elif item is not None:
            side = result.actual if one is None else result.expected
            side.records = side.records.add(1, describe_record(item))
        if watch is not None:
            watch(rank, one, other, found)
        done = result.records + result.places
        if done - ticked > _TICK:
            ticked = done
            progress(done)
    for side, file in zip((result.expected, result.actual), files, strict=True):
        side.complete, side.truncated = file.complete, file.truncated
        side.breaks = tuple(file.breaks) if isinstance(file, LineageReader) else ()
    return result, tally.refusals
