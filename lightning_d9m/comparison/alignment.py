"""Pairs of records: which record of one run is the counterpart of which record of another."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from lightning_d9m.ledger.format.frames import Batch, Frames
from lightning_d9m.ledger.format.reader import ABOUT_FRAMES, RankReader
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
        (record, its counterpart), the same object twice if their bytes are equal; (record, None) or
        (None, record) if only one run has it. The probes of a batch come as one ``Batch``, or as
        several of at least 131,072 places; equal blocks of them come as ``Frames``.
    """
    one, other = _Cursor(expected), _Cursor(actual)
    step = _Step()
    while not (one.ended and other.ended):
        if one.current is not None and one.current == other.current:
            item = one.skip()
            other.skip()
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
        current: The bytes of the current record, or the current frames; None at the end, and once
            ``look`` has read them.
    """

    def __init__(self, reader: RankReader) -> None:
        self._reader = reader
        self._entries = reader.entries()
        self._queue: deque[bytes | Frames] = deque()
        self._record: _Record | None = None
        # The current batch as (epoch, batch), and the number of its places that were passed.
        self._batch = (-1, -1)
        self._offset = 0
        self.current = self._pull()

    @property
    def ended(self) -> bool:
        """Whether no record is left."""
        return self.current is None and self._record is None

    def advance(self) -> None:
        """Move to the next record."""
        self._record = None
        self.current = self._pull()

    def skip(self) -> Item:
        """Return the current record, parsed, or all of the current frames, and move behind them."""
        entry = self.current
        assert entry is not None, "the caller has compared it"
        item: Item
        if isinstance(entry, Frames):
            item = entry
            if entry.count > 1:
                self._enter(entry.take(entry.count - 1, entry.count))
            else:
                self._enter(entry)
        else:
            item = self._reader.parse(entry)
        self.advance()
        return item

    def look(self, floor: LedgerPosition) -> _Record | None:
        """Return the current record, parsed; of frames, all that belong to the first batch."""
        entry, self.current = self.current, None
        if entry is not None:
            item: Item
            if isinstance(entry, Frames):
                item = self._collect(entry)
                size = 2 * len(item.digests)
            else:
                item = self._reader.parse(entry)
                # An empty list of 2 bytes takes about 64.
                size = 32 * len(entry)
            self._record = _Record(item, size, record_key(item), record_place(item, floor))
        return self._record

    def _pull(self) -> bytes | Frames | None:
        if self._queue:
            return self._queue.popleft()
        for entry in self._entries:
            if isinstance(entry, Frames) or not entry.startswith(ABOUT_FRAMES):
                return entry
        return None

    def _enter(self, frame: Frames) -> int:
        """Pass a frame; return the number of places of its batch before it."""
        if self._batch != (frame.epoch, frame.batch):
            self._batch = (frame.epoch, frame.batch)
            self._offset = 0
        self._offset += frame.size
        return self._offset - frame.size

    def _collect(self, frames: Frames) -> Batch:
        """Return the frames of one batch together."""
        parts: list[Frames] = []
        offset, size = 0, 0
        following: bytes | Frames | None = frames
        while isinstance(following, Frames) and size < _PART_PLACES:
            if parts and (following.epoch, following.batch) != self._batch:
                break
            first, *rest = [following] if following.count == 1 else following.split()
            self._queue.extendleft(reversed(rest))
            before = self._enter(first)
            offset = offset if parts else before
            parts.append(first)
            size += first.size
            following = self._pull()
        if following is not None:
            self._queue.appendleft(following)
        layouts = tuple(part.layout for part in parts)
        digests = b"".join(part.digests for part in parts)
        return Batch(frames.epoch, frames.step, frames.batch, offset, layouts, digests)


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
