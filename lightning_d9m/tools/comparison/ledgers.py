"""Compare two ledgers, or the ranks of one, as streams.

First differences in stack and settings, then the divergences of the records of each rank.
"""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import chain, groupby
from pathlib import Path
from typing import Literal, TypeAlias

from msgspec import to_builtins

from lightning_d9m.engine.ledger.command import BEGINS, SEEDED, SEGMENT
from lightning_d9m.engine.ledger.differences import (
    KIND_OF_GROUP,
    PROBE_SETTINGS,
    Divergence,
    FieldDifference,
    find_difference,
    header_differences,
    list_varying_ops,
    name_call,
    run_refusals,
)
from lightning_d9m.engine.ledger.folder import Ledger, read_ledger
from lightning_d9m.engine.ledger.format.reader import RankReader, read_resume
from lightning_d9m.engine.ledger.format.records import (
    Batch,
    Digests,
    End,
    Evaluation,
    Header,
    ProbeLayout,
    RankDrift,
    Resume,
    RunFacts,
    StepDigests,
)
from lightning_d9m.engine.ledger.keys import (
    LEDGER_START,
    Item,
    Key,
    LedgerPosition,
    describe_record,
    record_key,
    record_place,
)
from lightning_d9m.engine.ledger.kinds import ENDS, STATE, STEP
from lightning_d9m.engine.ledger.stack import (
    SHARDED_PARAMETERS,
    are_portable,
    same_logical_ranks,
    stack_differences,
)
from lightning_d9m.errors import DriftError
from lightning_d9m.text import escape

# Groups of digests and kinds of probes and records that hold logged values, and evaluations.
LOGGED = frozenset({"scalar", "scalars"})
EVALUATED = LOGGED | {"evaluation"}
# Records between two updates of the progress line: rich takes longer to draw it than a comparison
# takes for many of them.
_TICK = 2**16
# What decides which devices have generators.
_DEVICES = ("device.kind", "device.count")
_Fields: TypeAlias = dict[str, FieldDifference]
RecordPair: TypeAlias = tuple[Item | None, Item | None]

RecordObserver: TypeAlias = Callable[[int, Item | None, Item | None, Divergence | None], None]


@dataclass(slots=True)
class RunSide:
    """One of two runs: what only its file of a rank has, and how the file ends.

    Attributes:
        records: Number of records that the other run does not have.
        beyond: Number of those of them that come after the last record of both.
        first_record: Description of the first of them; empty if there is none.
        places: Number of places, in batches of both, that the other run does not have.
        torn: Number of those of them in the last record of both, which may be torn there.
        first_place: Description of the first of them; empty if there is none.
        end: The status with which it ended; empty for a run that was killed or still trains.
        reason: What ended it; empty if that is not known.
        truncated: Whether its last record is torn and was skipped.
        breaks: Where the run was interrupted and resumed, in order; a later one without a parent
            only adds reasons why a resume was inexact.
        problem: Why what the first of them continues is not read; empty if it is.
        last_step: The global step of its last record.
    """

    records: int = 0
    beyond: int = 0
    first_record: str = ""
    places: int = 0
    torn: int = 0
    first_place: str = ""
    end: str = ""
    reason: str = ""
    truncated: bool = False
    breaks: tuple[Resume, ...] = ()
    problem: str = ""
    last_step: int = 0

    def note(self, item: Item | None) -> None:
        """Keep the last step, the breaks, and what ended the run, of a record of this run."""
        self.last_step = max(self.last_step, getattr(item, "step", 0))
        if isinstance(item, End):
            self.end = item.status
            self.reason = item.reason or (item.error or "").partition("\n")[0]
        if isinstance(item, Resume):
            self.breaks += (item,)

    @property
    def alone(self) -> int:
        """Number of records and places that the other run does not have."""
        return self.records + self.places


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
        error: The exception that ended both runs; empty if they finished, or only one did.
        sees_end: Whether the last state of both runs was compared.
        undigested: Where the first value without a digest is, which was not compared, and why it
            has none; empty if there is none.
        places: Number of places (probes) that were compared.
        differing_places: Number of them that differ.
        groups: The groups of digests, kinds of probes and of records in which something differs, as
            long as no state of the training does.
        divergence: The first divergence; None if all pairs agree.
        trained: The first one in more than logged values and evaluations; None without one.
        segment: If one of the runs is a segment of the other, its first and its last global step;
            what comes before or after it is not compared.
    """

    rank: int
    records: int = 0
    digests: int = 0
    epochs: int = 0
    differing: int = 0
    expected: RunSide = field(default_factory=RunSide)
    actual: RunSide = field(default_factory=RunSide)
    batches: int = 0
    differing_batches: int = 0
    uncompared_batches: int = 0
    error: str = ""
    sees_end: bool = False
    undigested: str = ""
    places: int = 0
    differing_places: int = 0
    groups: tuple[str, ...] = ()
    divergence: Divergence | None = None
    trained: Divergence | None = None
    segment: tuple[int, int] | None = None

    def count(self, item: Item, found: Divergence | None) -> None:
        """Count a pair of counterparts, of which one is given, and how they differ."""
        differing = 0 if found is None else found.count
        if (problem := getattr(item, "problem", None)) and not self.undigested:
            self.undigested = f"{describe_record(item)}: {problem}"
        if not isinstance(item, Batch):
            self.records += 1
            self.differing += bool(differing)
            self.digests += isinstance(item, Digests | StepDigests)
            self.epochs += isinstance(item, Digests) and item.moment == "epoch"
            self.sees_end |= isinstance(item, Digests) and item.moment in ENDS
            if isinstance(item, End) and item.status == "failed" and found is None:
                self.error = (item.error or "").partition(":")[0] or "an exception"
                # It is raised by the record whose state it is about.
                self.sees_end |= self.error == DriftError.__name__
        else:
            self.batches += 1
            self.places += item.size if found is None else found.compared
            self.differing_places += differing
            self.differing_batches += bool(differing)
        if found is None:
            return
        for side, run in ((self.expected, "actual"), (self.actual, "expected")):
            if places := [place for place in found.one_sided if getattr(place, run) is None]:
                name = f"{places[0].kind} {name_call(places[0].name, places[0].call)}"
                side.places += len(places)
                side.torn = len(places)
                side.first_place = side.first_place or f"{escape(name)} in {found.where}"
        # Whatever differs after the training does follows from it.
        if differing and self.trained_alike:
            self.groups = tuple(dict.fromkeys((*self.groups, *found.by_kind)))
        if differing and _is_earlier(found, self.divergence):
            self.divergence = found.keep(self.rank)
        is_trained = differing and not EVALUATED.issuperset(found.by_kind)
        if is_trained and _is_earlier(found, self.trained):
            self.trained = found.keep(self.rank)

    def as_json(self) -> dict[str, object]:
        """Return the comparison as JSON types; the names are those of the attributes."""
        found = {"divergence": self.divergence, "trained": self.trained}
        facts: dict[str, object] = to_builtins(replace(self, divergence=None, trained=None))
        return facts | {name: own and own.as_json() for name, own in found.items()}

    @property
    def trained_alike(self) -> bool:
        """True if only logged values and evaluations differ."""
        return EVALUATED.issuperset(self.groups)

    @property
    def verdict(self) -> Literal["equal", "different", "incomplete"]:
        """That on this rank; see ``Comparison.verdict``."""
        shorter, longer = sorted((self.expected, self.actual), key=lambda side: side.alone)
        # One file may be the beginning of the other, and not say that its run ended.
        is_cut = longer.alone == longer.beyond + longer.torn and not shorter.end
        if self.divergence or shorter.alone or (longer.alone and not is_cut):
            return "different"
        # A segment is compared as far as it goes.
        is_cut &= bool(longer.alone) or self.segment is None
        return "incomplete" if is_cut or (self.error and not self.sees_end) else "equal"


def _is_earlier(found: Divergence, known: Divergence | None) -> bool:
    """Return whether a difference takes the place of the first one that is known.

    The record of the state after a step comes before the probes of the batch that begins with this
    state, or the digests where an epoch ends with it. These show each entry of it, as in a run that
    has no such record.
    """
    if known is None:
        return True
    begins = found.moment == "batch" and found.kind in STATE and not found.call
    ends = found.moment != "batch" and known.kind in found.by_kind
    return (begins or ends) and known.moment == STEP and known.step == found.step


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
        portable: Whether both runs computed portable bits, so that no stack explains a difference.
        probes: The kinds of probes that both runs recorded.
        varying_ops: Ops that one of the runs allowed although they may vary.
        seeded: The last calls with which each run seeded torch before the fit.
        begins_late: Whether a step begins after its forward pass: the program has no optimizer of
            torch.
    """

    expected: Path
    actual: Path
    stack: tuple[FieldDifference, ...]
    settings: tuple[FieldDifference, ...]
    refusals: tuple[FieldDifference, ...]
    ranks: tuple[RankComparison, ...]
    ranks_only_expected: tuple[int, ...]
    ranks_only_actual: tuple[int, ...]
    portable: bool = False
    probes: frozenset[str] = frozenset()
    varying_ops: tuple[str, ...] = ()
    seeded: tuple[str, ...] = ("", "")
    begins_late: bool = False

    def as_json(self) -> dict[str, object]:
        """Return the comparison as JSON types; the names are those of the attributes."""
        paths = {"expected": str(self.expected), "actual": str(self.actual)}
        ranks = [rank.as_json() for rank in self.ranks]
        facts = asdict(replace(self, ranks=())) | {"probes": sorted(self.probes)}
        return {"verdict": self.verdict, **facts, **paths, "ranks": ranks}

    @property
    def verdict(self) -> Literal["equal", "different", "incomplete", "not comparable"]:
        """``"equal"`` only if something was compared and no record differs or is missing.

        ``"incomplete"`` if a run does not say that it ended, or an exception ended both at a state
        that was not recorded, and all that was recorded is equal. A segment ends early on purpose:
        it is equal to its part of the other run.
        """
        if self.refusals or not self.ranks:
            return "not comparable"
        verdicts = {rank.verdict for rank in self.ranks}
        # A missing rank is a difference, whatever the other ranks say.
        if self.ranks_only_expected or self.ranks_only_actual or "different" in verdicts:
            return "different"
        # Without digests to compare, nothing is proven.
        if not all(rank.digests or rank.places for rank in self.ranks):
            return "not comparable"
        return "incomplete" if "incomplete" in verdicts else "equal"

    @property
    def extent(self) -> Literal["logged values", "evaluations", "training"]:
        """The most that differs: the first two only if the runs have the same records."""
        alone = (self.ranks_only_expected, self.ranks_only_actual)
        alike = all(rank.trained_alike for rank in self.ranks)
        if any(alone) or self.one_is_longer or not alike:
            return "training"
        logged = all(LOGGED.issuperset(rank.groups) for rank in self.ranks)
        return "logged values" if logged else "evaluations"

    @property
    def one_is_longer(self) -> bool:
        """True if a run has records that the other does not have."""
        return any(side.records for rank in self.ranks for side in (rank.expected, rank.actual))

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

        If the training differs, it is that of the training: logged values and evaluations may
        differ earlier by nature, see ``logged``. Within a rank the order of execution decides: that
        of the records in the file, and within a batch that of the places in the earlier run. Places
        that only one run has do not count.
        """
        found = [rank.trained for rank in self.ranks if rank.trained is not None]
        return sorted(found or self._all, key=lambda entry: entry.when)

    @property
    def _all(self) -> list[Divergence]:
        return [rank.divergence for rank in self.ranks if rank.divergence is not None]

    @property
    def logged(self) -> Divergence | None:
        """The first logged value or evaluation that differs before the training does, or None."""
        found = min(self._all, key=lambda entry: entry.when, default=None)
        # It is named only if the training differs later, or it is the first divergence itself.
        is_first = found is not None and EVALUATED.issuperset(found.by_kind)
        return found if is_first and found not in self.divergences else None


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
    # Headers come first: they decide whether records are worth reading.
    comparison = _compare_headers(expected, actual)
    common = [rank for rank in expected.files if rank in actual.files]
    # What was probed is not what was computed.
    selected = all(entry.field not in PROBE_SETTINGS for entry in comparison.settings)
    refusals: _Fields = {}
    ranks: list[RankComparison] = []
    done = ticked = 0
    # Runs that their headers make incomparable stay so, and a ledger may be long.
    for rank in () if comparison.refusals else common:
        rank_pass = _RankPass(rank, (expected, actual), selected=selected)
        # It grows while the pairs are read.
        result = rank_pass.result
        for pair in rank_pass.compare_records():
            if watch is not None:
                watch(rank, *pair)
            so_far = done + result.records + result.places
            if progress is not None and so_far - ticked > _TICK:
                progress(ticked := so_far)
        done += result.records + result.places
        ranks.append(result)
        _add_fields(refusals, rank_pass.refusals, (rank,))
    return replace(
        comparison, ranks=tuple(ranks), refusals=comparison.refusals or tuple(refusals.values())
    )


def _compare_headers(expected: Ledger, actual: Ledger) -> Comparison:
    """Return all of a comparison but that of the records."""
    runs = (expected, actual)
    stack: _Fields = {}
    settings: _Fields = {}
    refusals: _Fields = {}
    pairs: list[tuple[tuple[int, ...], Header, Header]] = [
        ((rank,), header, actual.headers[rank])
        for rank, header in expected.headers.items()
        if rank in actual.headers
    ]
    for ranks, one, other in pairs or [((), expected.header, actual.header)]:
        differing = stack_differences(one.stack, other.stack)
        _add_fields(stack, [FieldDifference(*entry) for entry in differing], ranks)
        refused, others = header_differences(one, other)
        _add_fields(settings, others, ranks)
        _add_fields(refusals, refused, ranks)
    # Where logical ranks do the same on any number of processes, a file without a counterpart is
    # not a part of the training that only one run has.
    any_processes = same_logical_ranks(expected.header.stack, actual.header.stack)
    alone = [
        () if any_processes else tuple(rank for rank in run.files if rank not in other.files)
        for run, other in (runs, runs[::-1])
    ]
    return Comparison(
        expected=expected.path,
        actual=actual.path,
        stack=tuple(stack.values()),
        settings=tuple(settings.values()),
        refusals=tuple(refusals.values()),
        ranks=(),
        ranks_only_expected=alone[0],
        ranks_only_actual=alone[1],
        portable=are_portable(expected.header.settings, actual.header.settings),
        seeded=tuple(str(run.header.program.get(SEEDED, "")) for run in runs),
        begins_late=BEGINS in expected.header.settings,
        probes=frozenset.intersection(
            *(frozenset(str(run.header.settings.get("probes", "")).split()) for run in runs)
        ),
        varying_ops=list_varying_ops(expected.header, actual.header),
    )


def _add_fields(table: _Fields, fields: Iterable[FieldDifference], ranks: tuple[int, ...]) -> None:
    """Add the fields that differ on some ranks; those that differ in the same way are one."""
    for entry in fields:
        known = table.setdefault(repr(entry), entry)
        table[repr(entry)] = replace(known, ranks=(*known.ranks, *ranks))


class _RankPass:
    """The comparison of one rank's files.

    ``selected`` says whether both runs have the same probes of batches.

    Attributes:
        result: What was compared so far.
        refusals: What makes the runs incomparable; nothing is read after the record that shows it.
    """

    def __init__(self, rank: int, runs: tuple[Ledger, Ledger], *, selected: bool) -> None:
        self.result = RankComparison(rank)
        self.refusals: list[FieldDifference] = []
        self._runs, self._selected = runs, selected
        self._sides = (self.result.expected, self.result.actual)
        self._are_parts = [SEGMENT in run.header.program for run in runs]
        # The micro-batches of a process are those of its logical ranks: on a different number of
        # processes they have no counterparts.
        self._same_processes = runs[0].header.world_size == runs[1].header.world_size
        # The total of the generators covers those of each device.
        devices = ([own.header.stack.get(name) for name in _DEVICES] for own in runs)
        self._same_devices = len({*map(tuple, devices)}) == 1

    def compare_records(self) -> Iterator[tuple[Item | None, Item | None, Divergence | None]]:
        """Yield each record that counts, its counterpart and their difference."""
        expected, actual = self._runs
        rank = self.result.rank
        with expected.open(rank) as first, actual.open(rank) as second:
            start = max(map(_find_start, (first, second), self._are_parts))
            for item, one, other in self._list_counted(align_records(first, second), start):
                found = None
                if isinstance(item, Batch) and not self._same_processes:
                    self.result.uncompared_batches += 1
                    continue
                if one is None or other is None:
                    side = self._sides[one is None]
                    side.first_record = side.first_record or describe_record(item)
                    side.records, side.beyond = side.records + 1, side.beyond + 1
                elif one is not other and isinstance(one, RunFacts) and isinstance(other, RunFacts):
                    self.result.records += 1
                    self.refusals = run_refusals(one, other)
                    if self.refusals:
                        break
                else:
                    found = self._find_difference(one, other)
                    # One within an epoch has the place of its end, which a segment need not reach.
                    for side in () if isinstance(item, Evaluation) else self._sides:
                        side.beyond = side.torn = 0
                    self.result.count(item, found)
                yield one, other, found
        files = zip(self._sides, (first, second), self._are_parts, self._sides[::-1], strict=True)
        for side, file, is_part, longer in files:
            side.truncated, side.problem = file.truncated, file.problem
            if is_part and side.end in ("", "stopped"):  # it says nothing of what follows
                longer.records, longer.beyond = longer.records - longer.beyond, 0
                longer.first_record = longer.first_record if longer.records else ""
        if any(self._are_parts):
            last_step = self._sides[self._are_parts.index(True)].last_step
            self.result.segment = (start[2], last_step)

    def _list_counted(
        self, records: Iterable[RecordPair], start: LedgerPosition
    ) -> Iterator[tuple[Item, Item | None, Item | None]]:
        """Yield each record that counts, as the one or the other run has it, and as both have."""
        is_segment, place = any(self._are_parts), LEDGER_START
        for one, other in records:
            item = other or one
            assert item is not None, "one run has it"
            place = record_place(item, place)
            is_pair = one is not None and other is not None
            # A segment is compared as far as the run has recorded its state, too.
            if is_pair or not (is_segment and isinstance(item, StepDigests | Batch)):
                for side, own in zip(self._sides, (one, other), strict=True):
                    side.note(own)
            if isinstance(item, StepDigests):
                # Runs may save at different steps. Generators are those of a process.
                counts = is_pair and self._same_processes and place >= start
            elif isinstance(item, Batch):
                counts = place >= start and (is_pair or self._selected)
            elif isinstance(item, End):
                # Where a segment was stopped, the other run need not end.
                ends = [end for end in (one, other) if isinstance(end, End)]
                first = min(ends, key=lambda end: (end.step, end.status != "stopped"))
                counts = first.status != "stopped"
            else:
                is_break = isinstance(item, Resume)
                counts = isinstance(item, RunFacts) or (place >= start and not is_break)
            if counts:
                yield item, one, other

    def _find_difference(self, one: Item, other: Item) -> Divergence | None:
        """Return how counterparts differ, in what both runs selected and have generators for."""
        if isinstance(one, StepDigests) and not self._same_devices:
            assert isinstance(other, StepDigests), "they have one key"
            one, other = one.leave_out_generators(), other.leave_out_generators()
        found = find_difference(one, other)
        if found is None or self._selected:
            return found
        return replace(found, one_sided=[]) if found.places else None


def _find_start(file: RankReader, is_part: bool) -> LedgerPosition:
    """Return the place at which a segment begins; the beginning of any other run."""
    resumed = read_resume(file.path) if is_part else None
    if resumed is None:
        return LEDGER_START
    # Phase 1 of an epoch has its batches, as in `record_place`.
    return (resumed.epoch, 1 if resumed.batch else 0, resumed.step)


def find_rank_drift(ledger: Ledger) -> Divergence | None:
    """Return where the entry that ended a run with a ``DriftError`` first differs between ranks.

    The run has compared its ranks: the end of its ledger names the entry and the rank. Probes show
    the step, and whether the gradient differs before the weight.

    ``expected`` of the ``Divergence`` is the value on ``reference_rank``. None if no ``DriftError``
    ended the run, or the ledger does not show the entry.

    Raises:
        LedgerError: If a record is malformed or was edited.
    """
    ends = (ledger.outcome(rank).end for rank in ledger.files)
    known = next((end.drift for end in ends if end is not None and end.drift is not None), None)
    if known is None or not {known.rank, reference_rank(known)} <= ledger.files.keys():
        return None
    # Probes have the kind weight where digests have the group weights.
    kinds = {KIND_OF_GROUP.get(known.group)}
    with ledger.open(reference_rank(known)) as one_file, ledger.open(known.rank) as other_file:
        for one, other in align_records(one_file, other_file):
            # Probes hold the digests of shards, which differ.
            shards = isinstance(other, Batch) and ledger.header.stack.get(SHARDED_PARAMETERS)
            if one is None or shards or not isinstance(other, Digests | Batch):
                continue
            found = find_difference(one, other)
            places = () if found is None else found.places
            if isinstance(other, Digests):
                own = [p for p in places if (p.kind, p.name) == (known.group, known.name)]
            else:
                named = [p for p in places if f"{p.name}:".startswith(f"{known.name}:")]
                own = [place for place in named if place.kind in kinds]
                # Ranks may hold parts of the gradients: these count once all of them were equal.
                if all(place.kind != "gradient" for place in places):
                    kinds.add("gradient")
            if own and found is not None:
                return replace(found, places=own, count=len(own)).keep(known.rank)
    return None


def reference_rank(drift: RankDrift | Divergence) -> int:
    """Return the rank whose values a drift has as expected."""
    return 1 if drift.rank == 0 else 0


def align_records(*readers: RankReader) -> Iterator[RecordPair]:
    """Pair the records of two runs, as streams: memory is bounded by one step's records.

    The run that is behind (by epoch and step) advances. Within one step, records are paired by
    their keys, in any order. Layouts are not paired: they are part of the probes that name them.

    Yields:
        (record, its counterpart), the same object twice if they are equal; (record, None) or
        (None, record) if only one run has it. The probes of a batch come as one ``Batch``.
    """
    streams = [_place_records(reader) for reader in readers]
    heads = [next(stream, None) for stream in streams]
    waiting: dict[Key, deque[tuple[int, Item]]] = {}  # records of one run, by key
    floor = LEDGER_START
    # Only the run that is behind advances, so what waits belongs to one step.
    while present := [head for head in heads if head is not None]:
        # Two heads with one key are a pair even if their places differ: a kind without a place has
        # that of the record before it, which only one run may have.
        lowest = min(place for place, _, _ in present)
        alike = len(present) > 1 and present[0][1] == present[1][1]
        if lowest > floor:  # what waits has no counterpart any more
            yield from _list_alone(waiting)
            waiting, floor = {}, lowest
        for side, head in enumerate(tuple(heads)):
            if head is None or not (alike or head[0] == lowest):
                continue
            heads[side] = next(streams[side], None)
            _, key, item = head
            queue = waiting.setdefault(key, deque())
            if not queue or queue[0][0] == side:
                queue.append((side, item))
                continue
            _, found = queue.popleft()
            if not queue:
                del waiting[key]
            one, other = (found, item) if side else (item, found)
            # Observers tell equal records by identity, without a second comparison of long digests.
            yield (one, one) if one == other else (one, other)
    yield from _list_alone(waiting)


def _list_alone(waiting: Mapping[Key, Iterable[tuple[int, Item]]]) -> Iterator[RecordPair]:
    for side, item in chain.from_iterable(waiting.values()):
        yield (None, item) if side else (item, None)


def _delay(records: Iterable[Item]) -> Iterator[Item]:
    """Yield records, evaluations after the digests that follow them.

    If both differ, the weights are then reported first: they usually cause the difference.
    """
    waiting: list[Item] = []
    for item in records:
        if isinstance(item, Evaluation):
            waiting.append(item)
        elif isinstance(item, Digests | End):
            yield from (*waiting, item) if isinstance(item, End) else (item, *waiting)
            waiting.clear()
        else:
            yield item
    yield from waiting


def _place_records(reader: RankReader) -> Iterator[tuple[LedgerPosition, Key, Item]]:
    """Yield (place, key, record) of a run, sorted by place; the parts of a batch are joined."""

    def name(item: Item) -> object:
        return (item.epoch, item.batch, item.step) if isinstance(item, Batch) else object()

    place = LEDGER_START
    records = (item for item in _delay(reader.records()) if not isinstance(item, ProbeLayout))
    # The key of any other record is a fresh object, equal to no other: only parts of a batch are
    # joined.
    for _, group in groupby(records, key=name):
        item, *others = group
        if isinstance(item, Batch):
            parts = [item, *(part for part in others if isinstance(part, Batch))]
            layouts = tuple(chain.from_iterable(part.layouts for part in parts))
            item = replace(item, layouts=layouts, digests=b"".join(part.digests for part in parts))
        place = record_place(item, place)
        yield place, record_key(item), item
