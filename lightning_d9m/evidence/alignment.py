"""Which record of one run is the counterpart of which record of another."""

import re
from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from lightning_d9m.evidence.batches import MOST_PLACES, Batch
from lightning_d9m.evidence.display import describe_moment, plain
from lightning_d9m.evidence.rank_file import RankReader
from lightning_d9m.evidence.record_text import PROBES_HEAD
from lightning_d9m.evidence.records import Digests, End, Layout, Opaque, Probes, Record
from lightning_d9m.evidence.schema import KNOWN_KINDS

Key: TypeAlias = tuple[object, ...]
Place: TypeAlias = tuple[int, int, int]
Item: TypeAlias = Record | Batch
Pair: TypeAlias = tuple[Item | None, Item | None]

START: Place = (0, 0, 0)
# A pair of records with equal bytes and of a kind that this version does not know: not parsed.
UNPARSED: Pair = (None, None)

_LAST = 2**63
_NAMED = ("moment", "epoch", "step", "batch", "phase", "name", "module", "op", "call")
_KINDS = tuple(b'{"kind":"%b"' % kind.encode() for kind in KNOWN_KINDS)
_EQUAL_DIGESTS = re.compile(
    rb'{"kind":"digests","moment":"(initial|epoch|final)","epoch":([0-9]{1,18}),"step":([0-9]{1,18}),'
)
# A digest or a number as ``float.hex`` gives it; no name, because a name follows no colon.
_VALUE = re.compile(rb':"(?:[0-9a-f]{32}|-?0x[01]\.[0-9a-f]+p[+-][0-9]+)"')
_LAYOUT = b'{"kind":"layout"'
_PROBES = b'{"kind":"probes"'
# Records of one step may come in another order in each run. So many bytes of a step are kept to
# find their counterparts; beyond that, those that wait count as records of one run only.
_KEPT_BYTES = 64 * 2**20


def record_key(record: Item) -> Key:
    """Return what identifies a record within its rank, so that counterparts find each other.

    The step of an epoch's digests is no part of it: that two runs reach the end of an epoch at
    different steps is a difference, not another record.
    """
    if isinstance(record, Batch | Probes):
        return ("probes", record.epoch, record.batch)
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


def record_place(record: Item, previous: Place) -> Place:
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
    if isinstance(record, Batch | Probes):
        return max(previous, (record.epoch, 1, record.step))
    if isinstance(record, Opaque):
        epoch, step = record.fields.get("epoch", previous[0]), record.fields.get("step")
        if isinstance(epoch, int) and isinstance(step, int):
            return max(previous, (epoch, 1, step))
    return previous


def describe_record(record: Item) -> str:
    """Return a record in a few words, for people."""
    if isinstance(record, Digests):
        return describe_moment(record.moment, record.epoch, record.step)
    if isinstance(record, Batch | Probes):
        return f"batch {record.batch} of epoch {record.epoch} (step {record.step})"
    if isinstance(record, Opaque):
        named = [(name, record.fields[name]) for name in _NAMED if name in record.fields]
        return " ".join([plain(record.kind), *(f"{name} {plain(value)}" for name, value in named)])
    return {"run": "the facts of the run", "end": "the end of the run"}.get(
        str(record.as_record()["kind"]), "the header"
    )


def align_records(
    expected: RankReader,
    actual: RankReader,
    *,
    whole: bool = True,
    named: Callable[[], bool] = lambda: True,
) -> Iterator[Pair]:
    """Pair the records of two runs, as streams: memory is bounded by one step's records.

    The run that is behind (by epoch and step) advances. Within one step, records find each other
    by their keys in any order. Layouts are not paired: they are part of the probes that name them.

    Args:
        expected: The earlier run's file.
        actual: The later run's.
        whole: Whether digests with equal bytes are parsed in full; without, what they are of is
            read and nothing else, which takes a tenth of the time.
        named: Says whether it is still asked in what digests differ. As soon as it is not, those
            that have the same names in the same order are not parsed either; their text is in
            ``extra``.

    Yields:
        (record, its counterpart), twice the same object when their bytes are equal; (record, None)
        or (None, record) for what one run has alone; ``UNPARSED``. The probes of a batch come as a
        ``Batch``, or as several where only some of its records are equal.
    """
    one, other = _Side(expected), _Side(actual)
    merge = _Merge()
    one.advance(other)
    other.advance(one)
    while one.body is not None or other.body is not None:
        pair = _read_equal(one, other, whole=whole)
        if pair is None and not whole and not named():
            pair = _read_unlike(one, other)
        if pair is not None:
            yield pair
            taken = (True, True)
        else:
            taken = yield from merge.step(one, other)
        if taken[0]:
            one.advance(other)
        if taken[1]:
            other.advance(one)
    yield from merge.flush()


def _read_equal(one: "_Side", other: "_Side", *, whole: bool) -> Pair | None:
    """Return the records that both runs have reached if their bytes mean the same."""
    body = one.body
    if body is None or body != other.body or one.entry or other.entry:
        return None
    if not body.startswith(_KINDS) and body.startswith(b'{"kind":"'):
        return UNPARSED
    if not whole and (head := _EQUAL_DIGESTS.match(body)) is not None:
        digests = _unparsed(head)
        return digests, digests
    record = one.reader.parse(body)
    if isinstance(record, Probes):
        if not one.reader.layouts.agrees(record.layout, other.reader.layouts):
            return None
        batch = one.begin(record)
        other.skip(batch)
        return batch, batch
    return record, record


def _read_unlike(one: "_Side", other: "_Side") -> Pair | None:
    """Return the digests that both runs have reached if they differ and nothing else does.

    They do where their texts differ in values alone; that the rest is well formed is known from a
    record with the same rest, which was parsed.
    """
    if one.body is None or other.body is None or one.entry or other.entry:
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
class _Entry:
    """The record that one run has reached."""

    item: Item
    size: int
    key: Key
    place: Place


class _Side:
    """Where one of two runs is.

    Attributes:
        reader: Its file.
        body: The record that it has reached; None at the end.
        entry: The same, parsed, with the records of the same batch; None as long as not needed.
        rest: The digests that were compared last, without their head and their values.
        layout: The layout that was read last, and its number.
    """

    def __init__(self, reader: RankReader) -> None:
        self.reader = reader
        self.body: bytes | None = None
        self.entry: _Entry | None = None
        self._bodies = reader.bodies()
        self._following: bytes | None = None
        self.layout: tuple[bytes, int] | None = None
        self.rest = b""
        # The batch under way and the number of its places that were given.
        self._batch = (-1, -1)
        self._offset = 0

    def advance(self, twin: "_Side | None" = None) -> None:
        """Go to the next record; the layouts before it are remembered."""
        self.entry = None
        if self._following is not None:
            self.body, self._following = self._following, None
        else:
            self.body = self._pull(twin)

    def look(self, floor: Place) -> _Entry | None:
        """Return the record that was reached, parsed; of probes, all that follow in the batch."""
        if self.body is None:
            return None
        if self.entry is None:
            item: Item = self.reader.parse(self.body)
            size = len(self.body)
            if isinstance(item, Probes):
                item = self._collect(item)
                size = 32 * item.size
            self.entry = _Entry(item, size, record_key(item), record_place(item, floor))
        return self.entry

    def begin(self, record: Probes) -> Batch:
        """Return a batch with one record, in its place within its batch."""
        if self._batch != (record.epoch, record.batch):
            self._batch = (record.epoch, record.batch)
            self._offset = 0
        batch = Batch(record.epoch, record.step, record.batch, self._offset)
        batch.add(record, self.reader.layouts)
        self._offset += batch.size
        return batch

    def skip(self, batch: Batch) -> None:
        """Count places that were read on the other side."""
        if self._batch != (batch.epoch, batch.batch):
            self._batch = (batch.epoch, batch.batch)
            self._offset = 0
        self._offset += batch.size

    def _collect(self, record: Probes) -> Batch:
        batch = self.begin(record)
        while (body := self._pull(None)) is not None and batch.size < MOST_PLACES:
            # Most batches are one record: then the next need not be parsed to be told apart.
            head = PROBES_HEAD.match(body)
            if head is not None and (int(head[1]), int(head[3])) != self._batch:
                break
            if not body.startswith(_PROBES):
                break
            following = self.reader.parse(body)
            if not isinstance(following, Probes) or self._batch != (
                following.epoch,
                following.batch,
            ):
                break
            batch.add(following, self.reader.layouts)
        self._offset = batch.offset + batch.size
        self._following = body
        return batch

    def _pull(self, twin: "_Side | None") -> bytes | None:
        for body in self._bodies:
            if not body.startswith(_LAYOUT):
                return body
            if twin is not None and twin.layout is not None and body == twin.layout[0]:
                self.reader.layouts.share(twin.reader.layouts, twin.layout[1])
                self.layout = twin.layout
                continue
            layout = self.reader.parse(body)
            if isinstance(layout, Layout):
                self.layout = (body, layout.id)
        return None


@dataclass(slots=True)
class _Merge:
    """The records of the current step that wait for their counterparts."""

    floor: Place = START
    waiting: tuple[dict[Key, deque[Item]], dict[Key, deque[Item]]] = field(
        default_factory=lambda: ({}, {})
    )
    kept: int = 0

    def step(self, *sides: _Side) -> Generator[Pair, None, tuple[bool, bool]]:
        """Take the record of the run that is behind, or both; return which was taken."""
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

    def _take(self, side: int, entry: _Entry) -> Iterator[Pair]:
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
