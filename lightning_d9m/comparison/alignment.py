"""Pairs of records: which record of one run is the counterpart of which record of another."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from lightning_d9m.ledger.format.frames import Batch, Frames
from lightning_d9m.ledger.format.reader import RankReader
from lightning_d9m.ledger.format.records import Digests, FramesEnd, ProbeLayout
from lightning_d9m.ledger.keys import (
    LEDGER_START,
    Item,
    Key,
    LedgerPosition,
    record_key,
    record_place,
)

RecordPair: TypeAlias = tuple[Item | None, Item | None]

# A batch with more places is compared in parts of about so many, which bounds memory.
_PART_PLACES = 2**17
# Records of one step may come in a different order in each run. Most bytes of a step that are kept
# to find their counterparts; beyond that, waiting records count as records of one run only.
_KEPT_BYTES = 64 * 2**20


def align_records(expected: RankReader, actual: RankReader) -> Iterator[RecordPair]:
    """Pair the records of two runs, as streams: memory is bounded by one step's records.

    The run that is behind (by epoch and step) advances. Within one step, records are paired by
    their keys, in any order. Layouts are not paired: they are part of the probes that name them.

    Yields:
        (record, its counterpart), the same object twice if they are equal; (record, None) or
        (None, record) if only one run has it. The probes of a batch come as one ``Batch``, or as
        several of at least 131,072 places.
    """
    one, other = _Cursor(expected), _Cursor(actual)
    step = _Step()
    while one.current is not None or other.current is not None:
        if one.current == other.current:
            item = one.current
            one.advance()
            other.advance()
            yield item, item
        else:
            yield from step.take(one, other)
    yield from step.flush()


@dataclass(frozen=True, slots=True)
class _Record:
    """The record at a cursor."""

    item: Item
    size: int
    key: Key
    place: LedgerPosition


class _Cursor:
    """A position in one of two ledgers that are read side by side.

    Attributes:
        current: The current record or batch; None at the end.
    """

    def __init__(self, reader: RankReader) -> None:
        self._items = _join_batches(reader)
        self.advance()

    def advance(self) -> None:
        """Move to the next record."""
        self.current = next(self._items, None)
        self._record: _Record | None = None

    def look(self, floor: LedgerPosition) -> _Record | None:
        """Return the current record with its key and place."""
        if self._record is None and self.current is not None:
            item = self.current
            key, place = record_key(item), record_place(item, floor)
            self._record = _Record(item, _estimate_bytes(item), key, place)
        return self._record


def _estimate_bytes(item: Item) -> int:
    if isinstance(item, Batch):
        return 2 * len(item.digests)
    names = sum(map(len, item.groups.values())) if isinstance(item, Digests) else 0
    return 1024 + 256 * names


def _join_batches(reader: RankReader) -> Iterator[Item]:
    """Yield the records of a ledger, with the consecutive frames of a batch together."""
    parts: list[Frames] = []
    # Of the current batch: its (epoch, batch), and its places before the parts, and in them.
    current, before, size = (-1, -1), 0, 0
    for record in reader.records():
        if isinstance(record, ProbeLayout | FramesEnd):
            continue
        if parts and not isinstance(record, Frames):
            yield _join(parts, before)
            before, size, parts = before + size, 0, []
        for frame in record.split() if isinstance(record, Frames) else ():
            found = (frame.epoch, frame.batch)
            if parts and (found != current or frame.step != parts[0].step or size >= _PART_PLACES):
                yield _join(parts, before)
                before, size, parts = before + size, 0, []
            before = before if found == current else 0
            current = found
            parts.append(frame)
            size += frame.size
        if not isinstance(record, Frames):
            yield record
    if parts:
        yield _join(parts, before)


def _join(parts: list[Frames], before: int) -> Batch:
    layouts = tuple(part.layout for part in parts)
    digests = b"".join(part.digests for part in parts)
    first = parts[0]
    return Batch(first.epoch, first.step, first.batch, before, layouts, digests)


@dataclass(slots=True)
class _Step:
    """The records of the current step that wait for their counterparts, by run and key."""

    floor: LedgerPosition = LEDGER_START
    waiting: tuple[dict[Key, deque[Item]], dict[Key, deque[Item]]] = field(
        default_factory=lambda: ({}, {})
    )
    kept: int = 0

    def take(self, *sides: _Cursor) -> Iterator[RecordPair]:
        """Take the record of the run that is behind, or both."""
        one, other = found = [side.look(self.floor) for side in sides]
        if one and other and one.key == other.key and not self._awaits(one.key):
            for side in sides:
                side.advance()
            yield one.item, other.item
            return
        lowest = min(record.place for record in found if record)
        if lowest > self.floor:
            yield from self.flush()
            self.floor = lowest
        for number, record in enumerate(found):
            if record and record.place == lowest:
                sides[number].advance()
                yield from self._match(number, record)

    def flush(self) -> Iterator[RecordPair]:
        """Yield the waiting records as records of one run only; no counterpart can follow."""
        for records in self.waiting[0].values():
            yield from ((record, None) for record in records)
        for records in self.waiting[1].values():
            yield from ((None, record) for record in records)
        for table in self.waiting:
            table.clear()
        self.kept = 0

    def _awaits(self, key: Key) -> bool:
        """Return whether an earlier record with this key still waits for its counterpart."""
        return key in self.waiting[0] or key in self.waiting[1]

    def _match(self, number: int, record: _Record) -> Iterator[RecordPair]:
        others = self.waiting[1 - number]
        if queue := others.get(record.key):
            found = queue.popleft()
            if not queue:
                del others[record.key]
            yield (found, record.item) if number else (record.item, found)
            return
        self.waiting[number].setdefault(record.key, deque()).append(record.item)
        self.kept += record.size
        if self.kept > _KEPT_BYTES:
            yield from self.flush()
