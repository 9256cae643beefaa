"""The position in one of two ledgers that are read side by side."""

from dataclasses import dataclass

from lightning_d9m.ledger.format.encoding import estimate_memory
from lightning_d9m.ledger.format.fields import DIGEST_BYTES
from lightning_d9m.ledger.format.probe_frames import Frames
from lightning_d9m.ledger.format.reader import ABOUT_FRAMES, RankReader
from lightning_d9m.ledger.keys import Item, Key, LedgerPosition, record_key, record_place
from lightning_d9m.ledger.probe_batch import BATCH_PART_PLACES, Batch


@dataclass(slots=True)
class LedgerRecord:
    """The record at the cursor."""

    item: Item
    size: int
    key: Key
    place: LedgerPosition


class LedgerCursor:
    """A cursor over the records and frames of one rank's ledger.

    Attributes:
        reader: The ledger.
        current: The bytes of the current record, or the current frames; None at the end.
        entry: The current record, parsed, or the frames of the current batch; None until it is
            needed.
        rest: The digests that were compared last, without their head and their values.
    """

    def __init__(self, reader: RankReader) -> None:
        self.reader = reader
        self.current: bytes | Frames | None = None
        self.entry: LedgerRecord | None = None
        self._entries = reader.entries()
        self._following: bytes | Frames | None = None
        self.rest = b""
        # The current batch as (epoch, batch), and the number of its places that were returned.
        self._batch = (-1, -1)
        self._offset = 0

    @property
    def body(self) -> bytes | None:
        """The bytes of the current record, if it is not frames and was not parsed."""
        return self.current if isinstance(self.current, bytes) and not self.entry else None

    @property
    def frames(self) -> Frames | None:
        """The current frames, if they were not taken as a batch."""
        return self.current if isinstance(self.current, Frames) and not self.entry else None

    def advance(self) -> None:
        """Move to the next record, or behind the frames of the current batch."""
        self.entry = None
        if self._following is not None:
            self.current, self._following = self._following, None
        else:
            self.current = self._pull()

    def skip(self, count: int) -> None:
        """Move behind some of the current frames."""
        frames = self.frames
        assert frames is not None, "the current entry is frames"
        self._enter(frames)
        if frames.count > 1:
            self._enter(frames.take(count - 1, count))
        self._offset += frames.width // DIGEST_BYTES
        if count < frames.count:
            self.current = frames.take(count, frames.count)
        else:
            self.advance()

    def look(self, floor: LedgerPosition) -> LedgerRecord | None:
        """Return the current record, parsed; of frames, all that belong to the first batch."""
        if self.entry is None and self.current is not None:
            if isinstance(self.current, Frames):
                batch = self._collect(self.current)
                item: Item = batch
                size = 2 * DIGEST_BYTES * batch.size
            else:
                item = self.reader.parse(self.current)
                size = estimate_memory(self.current)
            self.entry = LedgerRecord(item, size, record_key(item), record_place(item, floor))
        return self.entry

    def begin(self, frame: Frames) -> Batch:
        """Return a ``Batch`` of one frame, at its offset within the batch."""
        batch = self._enter(frame)
        batch.add(frame)
        return batch

    def _enter(self, frame: Frames) -> Batch:
        """Return an empty ``Batch`` for a frame."""
        if self._batch != (frame.epoch, frame.batch):
            self._batch = (frame.epoch, frame.batch)
            self._offset = 0
        return Batch(frame.epoch, frame.step, frame.batch, self._offset)

    def _collect(self, frames: Frames) -> Batch:
        batch = self.begin(frames.take(0, 1))
        following: bytes | Frames | None = None
        if frames.count > 1:
            following = frames.take(1, frames.count)
        else:
            while isinstance(following := self._pull(), Frames):
                other = (following.epoch, following.batch) != self._batch
                if other or batch.size >= BATCH_PART_PLACES:
                    break
                batch.add(following.take(0, 1))
                if following.count > 1:
                    following = following.take(1, following.count)
                    break
        self._offset = batch.offset + batch.size
        self._following = following
        return batch

    def _pull(self) -> bytes | Frames | None:
        for entry in self._entries:
            if isinstance(entry, Frames) or not entry.startswith(ABOUT_FRAMES):
                return entry
        return None
