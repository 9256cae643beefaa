"""Which record of one run is the counterpart of which record of another."""

from collections import deque
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from lightning_d9m.evidence.display import describe_moment, plain
from lightning_d9m.evidence.rank_file import RankReader
from lightning_d9m.evidence.records import Digests, End, Opaque, Record
from lightning_d9m.evidence.schema import KNOWN_KINDS

Key: TypeAlias = tuple[object, ...]
Place: TypeAlias = tuple[int, int, int]
Pair: TypeAlias = tuple[Record | None, Record | None]

START: Place = (0, 0, 0)
# A pair of records with equal bytes and of a kind that this version does not know: not parsed.
UNPARSED: Pair = (None, None)

_LAST = 2**63
_NAMED = ("moment", "epoch", "step", "batch", "phase", "name", "module", "op", "call")
_KINDS = tuple(b'{"kind":"%b"' % kind.encode() for kind in KNOWN_KINDS)
# Records of one step may come in another order in each run. So many bytes of a step are kept to
# find their counterparts; beyond that, those that wait count as records of one run only.
_KEPT_BYTES = 64 * 2**20


def record_key(record: Record) -> Key:
    """Return what identifies a record within its rank, so that counterparts find each other.

    The step of an epoch's digests is no part of it: that two runs reach the end of an epoch at
    different steps is a difference, not another record.
    """
    if isinstance(record, Digests):
        counted = record.moment in {"initial", "epoch", "final"}
        return ("digests", record.moment, record.epoch, None if counted else record.step)
    if isinstance(record, Opaque):
        key: Key = (record.kind, *map(record.fields.get, _NAMED))
        try:
            hash(key)
        except TypeError:  # a name that is a list or an object
            return (record.kind, repr(key))
        return key
    return (record.as_record()["kind"],)


def record_place(record: Record, previous: Place) -> Place:
    """Return where in the run a record belongs: (epoch, phase of the epoch, step), never falling.

    Args:
        record: The record.
        previous: The place of the record before it, for kinds that do not say where they belong.
    """
    if isinstance(record, Digests):
        if record.moment == "final":
            return (_LAST, 0, 0)
        phases = {"initial": (0, 0), "epoch": (2, 0)}
        return max(previous, (record.epoch, *phases.get(record.moment, (1, record.step))))
    if isinstance(record, End):
        return (_LAST, 1, 0)
    if isinstance(record, Opaque):
        epoch, step = record.fields.get("epoch", previous[0]), record.fields.get("step")
        if isinstance(epoch, int) and isinstance(step, int):
            return max(previous, (epoch, 1, step))
    return previous


def describe_record(record: Record) -> str:
    """Return a record in a few words, for people."""
    if isinstance(record, Digests):
        return describe_moment(record.moment, record.epoch, record.step)
    if isinstance(record, Opaque):
        named = [(name, record.fields[name]) for name in _NAMED if name in record.fields]
        return " ".join([plain(record.kind), *(f"{name} {plain(value)}" for name, value in named)])
    return {"run": "the facts of the run", "end": "the end of the run"}.get(
        str(record.as_record()["kind"]), "the header"
    )


def align_records(expected: RankReader, actual: RankReader) -> Iterator[Pair]:
    """Pair the records of two runs, as streams: memory is bounded by one step's records.

    The run that is behind (by epoch and step) advances. Within one step, records find each other
    by their keys in any order.

    Yields:
        (record, its counterpart), twice the same object when their bytes are equal; (record, None)
        or (None, record) for what one run has alone; ``UNPARSED``.
    """
    bodies = expected.bodies(), actual.bodies()
    merge = _Merge((expected, actual))
    one, other = next(bodies[0], None), next(bodies[1], None)
    while one is not None or other is not None:
        if one is not None and one == other:
            if one.startswith(b'{"kind":"') and not one.startswith(_KINDS):
                yield UNPARSED
            else:
                record = expected.parse(one)
                yield record, record
            one, other = next(bodies[0], None), next(bodies[1], None)
            continue
        behind = yield from merge.step(one, other)
        one = next(bodies[0], None) if behind[0] else one
        other = next(bodies[1], None) if behind[1] else other
    yield from merge.flush()


@dataclass(slots=True)
class _Entry:
    """The record that one run has reached."""

    body: bytes
    record: Record
    key: Key
    place: Place


@dataclass(slots=True)
class _Merge:
    """Where two runs are, and the records of the current step that wait for their counterparts."""

    readers: tuple[RankReader, RankReader]
    floor: Place = START
    reached: list[_Entry | None] = field(default_factory=lambda: [None, None])
    waiting: tuple[dict[Key, deque[Record]], dict[Key, deque[Record]]] = field(
        default_factory=lambda: ({}, {})
    )
    kept: int = 0

    def step(self, *bodies: bytes | None) -> Generator[Pair, None, tuple[bool, bool]]:
        """Take the record of the run that is behind, or both; return which was taken."""
        one, other = self._look(0, bodies[0]), self._look(1, bodies[1])
        if one and other and one.key == other.key and not self._awaits(one.key):
            yield one.record, other.record
            return True, True
        lowest = min(entry.place for entry in (one, other) if entry)
        if lowest > self.floor:
            yield from self.flush()
            self.floor = lowest
        taken = (
            one is not None and one.place == lowest,
            other is not None and other.place == lowest,
        )
        for side, entry in enumerate((one, other)):
            if entry and taken[side]:
                yield from self._take(side, entry)
        return taken

    def flush(self) -> Iterator[Pair]:
        """Give up on the records that wait: no counterpart can come any more."""
        for records in self.waiting[0].values():
            yield from ((record, None) for record in records)
        for records in self.waiting[1].values():
            yield from ((None, record) for record in records)
        for table in self.waiting:
            table.clear()
        self.kept = 0

    def _awaits(self, key: Key) -> bool:
        """Whether an earlier record with this key has yet to find its counterpart."""
        return key in self.waiting[0] or key in self.waiting[1]

    def _look(self, side: int, body: bytes | None) -> _Entry | None:
        if body is None:
            return None
        entry = self.reached[side]
        if entry is None or entry.body is not body:
            record = self.readers[side].parse(body)
            entry = _Entry(body, record, record_key(record), record_place(record, self.floor))
            self.reached[side] = entry
        return entry

    def _take(self, side: int, entry: _Entry) -> Iterator[Pair]:
        others = self.waiting[1 - side]
        if queue := others.get(entry.key):
            found = queue.popleft()
            if not queue:
                del others[entry.key]
            yield (found, entry.record) if side else (entry.record, found)
            return
        self.waiting[side].setdefault(entry.key, deque()).append(entry.record)
        self.kept += len(entry.body)
        if self.kept > _KEPT_BYTES:
            yield from self.flush()
