"""Pairs of records: which record of one run is the counterpart of which record of another."""

import re
from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from lightning_d9m.comparison.cursor import LedgerCursor, LedgerRecord
from lightning_d9m.comparison.frame_diff import find_differences, order_like
from lightning_d9m.ledger.format.encoding import kind_prefix
from lightning_d9m.ledger.format.reader import RankReader
from lightning_d9m.ledger.format.records import RECORD_TYPES, Digests
from lightning_d9m.ledger.keys import LEDGER_START, Item, Key, LedgerPosition

RecordPair: TypeAlias = tuple[Item | None, Item | None]

# A pair of records with equal bytes whose kind this version does not know; not parsed.
UNPARSED: RecordPair = (None, None)

_KNOWN = tuple(map(kind_prefix, RECORD_TYPES.values()))
_EQUAL_DIGESTS = re.compile(
    rb'{"kind":"digests","moment":"(initial|epoch|final)","epoch":([0-9]{1,18}),"step":([0-9]{1,18}),'
)
# A digest or a number in ``float.hex()`` form. It follows a colon, which a name does not.
_VALUE = re.compile(rb':"(?:[0-9a-f]{32}|-?0x[01]\.[0-9a-f]+p[+-][0-9]+)"')
# Records of one step may come in a different order in each run. Most bytes of a step that are kept
# to find their counterparts; beyond that, waiting records count as records of one run only.
_KEPT_BYTES = 64 * 2**20
# Most batches that are taken together where each is yielded.
_MOST_BATCHES = 1024


def align_records(
    expected: RankReader,
    actual: RankReader,
    *,
    whole: bool = True,
    named: Callable[[], bool] = lambda: True,
) -> Iterator[RecordPair]:
    """Pair the records of two runs, as streams: memory is bounded by one step's records.

    The run that is behind (by epoch and step) advances. Within one step, records are paired by
    their keys, in any order. Layouts are not paired: they are part of the probes that name them.

    Args:
        expected: The earlier run's ledger.
        actual: The later run's.
        whole: Whether to parse records with equal bytes in full, and to yield each batch. Otherwise
            only their epoch and step are read, which takes a tenth of the time.
        named: Returns whether the caller still needs the names of what differs. If not, digests
            with the same names in the same order are not parsed either; their text is in
            ``extra``. Batches then come in as many parts as they have frames.

    Yields:
        (record, its counterpart), the same object twice if they are equal; (record, None) or (None,
        record) if only one run has it; ``UNPARSED``. The probes of a batch come as one ``Batch``,
        or as several if only some of its frames are equal; unless ``whole``, those of many batches
        come as ``Frames``, with their places in the order of the earlier run.
    """
    one, other = LedgerCursor(expected), LedgerCursor(actual)
    merge = _Merge()
    one.advance()
    other.advance()
    while one.current is not None or other.current is not None:
        paired = _pair_frames(one, other, whole=whole, named=named)
        if paired:
            yield from paired
            continue
        pair = _read_equal(one, other, whole=whole)
        if pair is None and not whole and not named():
            pair = _read_unlike(one, other)
        if pair is not None:
            yield pair
            taken = (True, True)
        else:
            taken = yield from merge.step(one, other)
        if taken[0]:
            one.advance()
        if taken[1]:
            other.advance()
    yield from merge.flush()


def _pair_frames(
    one: LedgerCursor, other: LedgerCursor, *, whole: bool, named: Callable[[], bool]
) -> list[RecordPair]:
    """Take frames of the same batches and places from both runs, if both have some."""
    ours, theirs = one.frames, other.frames
    if ours is None or theirs is None:
        return []
    if (ours.epoch, ours.step, ours.batch) != (theirs.epoch, theirs.step, theirs.batch):
        return []
    count = min(ours.count, theirs.count, _MOST_BATCHES if whole else ours.count)
    if (ours.steps, ours.batches) != (theirs.steps, theirs.batches):
        count = 1
    ours, theirs = ours.take(0, count), order_like(ours, theirs.take(0, count))
    if theirs is None:
        return []
    if ours.digests == theirs.digests:
        theirs = ours
    elif whole or named():
        count = find_differences(ours, theirs).first
        ours = theirs = ours.take(0, count)
    if not count:
        return []
    pairs: list[RecordPair] = [(ours, theirs)]
    if whole:
        pairs = [(batch, batch) for batch in map(one.begin, ours.split())]
    one.skip(count)
    other.skip(count)
    return pairs


def _read_equal(one: LedgerCursor, other: LedgerCursor, *, whole: bool) -> RecordPair | None:
    """Return the current records of both runs if their bytes are equal."""
    body = one.body
    if body is None or body != other.body:
        return None
    if not body.startswith(_KNOWN):
        return UNPARSED
    if not whole and (head := _EQUAL_DIGESTS.match(body)) is not None:
        record = _unparsed(head)
        return record, record
    parsed = one.reader.parse(body)
    return parsed, parsed


def _read_unlike(one: LedgerCursor, other: LedgerCursor) -> RecordPair | None:
    """Return the digests at both cursors if they differ in values alone.

    The rest is known to be well formed because a record with the same rest was parsed before.
    """
    if one.body is None or other.body is None:
        return None
    heads = _EQUAL_DIGESTS.match(one.body), _EQUAL_DIGESTS.match(other.body)
    if heads[0] is None or heads[1] is None or heads[0][0] != heads[1][0]:
        return None
    end = heads[0].end()
    rest = _VALUE.sub(b":", one.body[end:])
    if rest != _VALUE.sub(b":", other.body[end:]):
        return None
    known, one.rest = one.rest, rest
    if rest != known:
        return None
    return _unparsed(heads[0], one.body), _unparsed(heads[1], other.body)


def _unparsed(head: re.Match[bytes], body: bytes | None = None) -> Digests:
    moment, epoch, step = head.groups()
    return Digests(
        moment=moment.decode(),
        epoch=int(epoch),
        step=int(step),
        totals={},
        groups={},
        extra={} if body is None else {"text": body},
    )


@dataclass(slots=True)
class _Merge:
    """The records of the current step that wait for their counterparts."""

    floor: LedgerPosition = LEDGER_START
    waiting: tuple[dict[Key, deque[Item]], dict[Key, deque[Item]]] = field(
        default_factory=lambda: ({}, {})
    )
    kept: int = 0

    def step(self, *sides: LedgerCursor) -> Generator[RecordPair, None, tuple[bool, bool]]:
        """Take the record of the run that is behind, or both; return which ones were taken."""
        one, other = (side.look(self.floor) for side in sides)
        if one and other and one.key == other.key and not self._awaits(one.key):
            yield one.item, other.item
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

    def _take(self, side: int, entry: LedgerRecord) -> Iterator[RecordPair]:
        others = self.waiting[1 - side]
        if queue := others.get(entry.key):
            found = queue.popleft()
            if not queue:
                del others[entry.key]
            yield (found, entry.item) if side else (entry.item, found)
            return
        self.waiting[side].setdefault(entry.key, deque()).append(entry.item)
        self.kept += entry.size
        if self.kept > _KEPT_BYTES:
            yield from self.flush()
