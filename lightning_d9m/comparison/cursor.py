"""One of two runs that are read side by side: the record that it has reached, and which that is."""

from dataclasses import dataclass

from lightning_d9m.ledger.encoding import PROBES_HEAD, estimate_memory
from lightning_d9m.ledger.keys import Item, Key, LedgerPosition, record_key, record_place
from lightning_d9m.ledger.probe_batch import MOST_PLACES, Batch
from lightning_d9m.ledger.reader import RankReader
from lightning_d9m.ledger.records import (
    DIGEST_DIGITS,
    ProbeLayout,
    ProbesRecord,
)

_LAYOUT = b'{"kind":"layout"'
_PROBES = b'{"kind":"probes"'


@dataclass(slots=True)
class LedgerRecord:
    """The record that one run has reached."""

    item: Item
    size: int
    key: Key
    place: LedgerPosition


class LedgerCursor:
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
        self.entry: LedgerRecord | None = None
        self._bodies = reader.bodies()
        self._following: bytes | None = None
        self.layout: tuple[bytes, int] | None = None
        self.rest = b""
        # The batch under way and the number of its places that were given.
        self._batch = (-1, -1)
        self._offset = 0

    def advance(self, twin: "LedgerCursor | None" = None) -> None:
        """Go to the next record; the layouts before it are remembered."""
        self.entry = None
        if self._following is not None:
            self.body, self._following = self._following, None
        else:
            self.body = self._pull(twin)

    def look(self, floor: LedgerPosition) -> LedgerRecord | None:
        """Return the record that was reached, parsed; of probes, all that follow in the batch."""
        if self.body is None:
            return None
        if self.entry is None:
            item: Item = self.reader.parse(self.body)
            size = estimate_memory(self.body)
            if isinstance(item, ProbesRecord):
                item = self._collect(item)
                size = 32 * item.size
            self.entry = LedgerRecord(item, size, record_key(item), record_place(item, floor))
        return self.entry

    def begin(self, record: ProbesRecord) -> Batch:
        """Return a batch with one record, in its place within its batch."""
        batch = self._enter(record.epoch, record.step, record.batch)
        batch.add(record, self.reader.layouts)
        self._offset += batch.size
        return batch

    def measure(self, body: bytes, twin: "LedgerCursor") -> Batch | None:
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

    def _collect(self, record: ProbesRecord) -> Batch:
        batch = self.begin(record)
        while (body := self._pull(None)) is not None and batch.size < MOST_PLACES:
            # Most batches are one record: then the next need not be parsed to be told apart.
            head = PROBES_HEAD.match(body)
            if head is not None and (int(head[1]), int(head[3])) != self._batch:
                break
            if not body.startswith(_PROBES):
                break
            following = self.reader.parse(body)
            if not isinstance(following, ProbesRecord) or self._batch != (
                following.epoch,
                following.batch,
            ):
                break
            batch.add(following, self.reader.layouts)
        self._offset = batch.offset + batch.size
        self._following = body
        return batch

    def _pull(self, twin: "LedgerCursor | None") -> bytes | None:
        for body in self._bodies:
            if not body.startswith(_LAYOUT):
                return body
            if twin is not None and twin.layout is not None and body == twin.layout[0]:
                self.reader.layouts.share(twin.reader.layouts, twin.layout[1])
                self.layout = twin.layout
                continue
            layout = self.reader.parse(body)
            if isinstance(layout, ProbeLayout):
                self.layout = (body, layout.id)
        return None
