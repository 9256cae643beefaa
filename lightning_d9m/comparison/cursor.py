"""One of two runs that are read side by side: the record that it has reached, and which that is."""

from dataclasses import dataclass
from typing import TypeAlias

from lightning_d9m.comparison.probe_diff import MOST_PLACES, Batch
from lightning_d9m.ledger.encoding import PROBES_HEAD
from lightning_d9m.ledger.reader import RankReader
from lightning_d9m.ledger.records import (
    DIGEST_DIGITS,
    Digests,
    End,
    Layout,
    Opaque,
    Probes,
    Record,
)
from lightning_d9m.text import describe_moment, plain

Key: TypeAlias = tuple[object, ...]
Place: TypeAlias = tuple[int, int, int]
Item: TypeAlias = Record | Batch

START: Place = (0, 0, 0)
# What a record of a kind that this version does not know is identified by.
_NAMED = ("moment", "epoch", "step", "batch", "phase", "name", "module", "op", "call")

_LAST = 2**63
_LAYOUT = b'{"kind":"layout"'
_PROBES = b'{"kind":"probes"'


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


@dataclass(slots=True)
class Entry:
    """The record that one run has reached."""

    item: Item
    size: int
    key: Key
    place: Place


class Side:
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
        self.entry: Entry | None = None
        self._bodies = reader.bodies()
        self._following: bytes | None = None
        self.layout: tuple[bytes, int] | None = None
        self.rest = b""
        # The batch under way and the number of its places that were given.
        self._batch = (-1, -1)
        self._offset = 0

    def advance(self, twin: "Side | None" = None) -> None:
        """Go to the next record; the layouts before it are remembered."""
        self.entry = None
        if self._following is not None:
            self.body, self._following = self._following, None
        else:
            self.body = self._pull(twin)

    def look(self, floor: Place) -> Entry | None:
        """Return the record that was reached, parsed; of probes, all that follow in the batch."""
        if self.body is None:
            return None
        if self.entry is None:
            item: Item = self.reader.parse(self.body)
            size = len(self.body)
            if isinstance(item, Probes):
                item = self._collect(item)
                size = 32 * item.size
            self.entry = Entry(item, size, record_key(item), record_place(item, floor))
        return self.entry

    def begin(self, record: Probes) -> Batch:
        """Return a batch with one record, in its place within its batch."""
        batch = self._enter(record.epoch, record.step, record.batch)
        batch.add(record, self.reader.layouts)
        self._offset += batch.size
        return batch

    def measure(self, body: bytes, twin: "Side") -> Batch | None:
        """Return a batch that is equal on both sides without its record; None if that must be read.

        Its digests are as many as the places of its layout; what they are need not be known.
        """
        head = PROBES_HEAD.match(body)
        if head is None or not body.endswith(b'"}'):
            return None
        epoch, step, number, layout = map(int, head.groups())
        size = self.reader.layouts.size(layout)
        if DIGEST_DIGITS * size != len(body) - head.end() - 2:
            return None
        if not self.reader.layouts.agrees(layout, twin.reader.layouts):
            return None
        batch = self._enter(epoch, step, number)
        batch.size = size
        self._offset += size
        return batch

    def skip(self, batch: Batch) -> None:
        """Count places that were read on the other side."""
        self._enter(batch.epoch, batch.step, batch.batch)
        self._offset += batch.size

    def _enter(self, epoch: int, step: int, number: int) -> Batch:
        if self._batch != (epoch, number):
            self._batch = (epoch, number)
            self._offset = 0
        return Batch(epoch, step, number, self._offset)

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

    def _pull(self, twin: "Side | None") -> bytes | None:
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
