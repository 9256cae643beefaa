"""The position in one of two ledgers that are read side by side."""

from dataclasses import dataclass

from lightning_d9m.ledger.encoding import PROBES_HEAD, estimate_memory
from lightning_d9m.ledger.keys import Item, Key, LedgerPosition, record_key, record_place
from lightning_d9m.ledger.probe_batch import BATCH_PART_PLACES, Batch
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
    """The record at the cursor."""

    item: Item
    size: int
    key: Key
    place: LedgerPosition


class LedgerCursor:
    """A cursor over the records of one rank's file.

    Attributes:
        reader: The file.
        body: The bytes of the current record; None at the end.
        entry: The current record, parsed, with the following records of the same batch; None until
            it is needed.
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
        # The current batch as (epoch, batch), and the number of its places that were returned.
        self._batch = (-1, -1)
        self._offset = 0

    def advance(self, other: "LedgerCursor | None" = None) -> None:
        """Move to the next record. Layouts before it are stored."""
        self.entry = None
        if self._following is not None:
            self.body, self._following = self._following, None
        else:
            self.body = self._pull(other)

    def look(self, floor: LedgerPosition) -> LedgerRecord | None:
        """Return the current record, parsed; probes with all that follow in their batch."""
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
        """Return a ``Batch`` of one record, at its offset within the batch."""
        batch = self._enter(record.epoch, record.step, record.batch)
        batch.add(record, self.reader.layouts)
        self._offset += batch.size
        return batch

    def measure(self, body: bytes, other: "LedgerCursor") -> Batch | None:
        """Return a batch that is equal in both files without parsing it; None if that is needed.

        It has as many digests as its layout has places; their values are not needed.
        """
        head = PROBES_HEAD.match(body)
        if head is None or not body.endswith(b'"}'):
            return None
        epoch, step, number, layout = map(int, head.groups())
        size = self.reader.layouts.size(layout)
        if DIGEST_DIGITS * size != len(body) - head.end() - 2:
            return None
        if not self.reader.layouts.agrees(layout, other.reader.layouts):
            return None
        batch = self._enter(epoch, step, number)
        batch.size = size
        self._offset += size
        return batch

    def skip(self, batch: Batch) -> None:
        """Count places that the other cursor has read."""
        self._enter(batch.epoch, batch.step, batch.batch)
        self._offset += batch.size

    def _enter(self, epoch: int, step: int, number: int) -> Batch:
        if self._batch != (epoch, number):
            self._batch = (epoch, number)
            self._offset = 0
        return Batch(epoch, step, number, self._offset)

    def _collect(self, record: ProbesRecord) -> Batch:
        batch = self.begin(record)
        while (body := self._pull(None)) is not None and batch.size < BATCH_PART_PLACES:
            # Most batches are one record. The head of the next record suffices to see that.
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

    def _pull(self, other: "LedgerCursor | None") -> bytes | None:
        for body in self._bodies:
            if not body.startswith(_LAYOUT):
                return body
            if other is not None and other.layout is not None and body == other.layout[0]:
                self.reader.layouts.share(other.reader.layouts, other.layout[1])
                self.layout = other.layout
                continue
            layout = self.reader.parse(body)
            if isinstance(layout, ProbeLayout):
                self.layout = (body, layout.id)
        return None
