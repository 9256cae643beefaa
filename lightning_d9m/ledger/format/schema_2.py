"""The files of frames of schema 2, read only: digests of probes in blocks with a hash chain.

A file begins with ``MAGIC``. A block has a head (layout, number of frames, growth of the step and
of the batch from frame to frame), the frames or, if their number is 0, the position before the next
frame, and XXH3-64 of both, seeded with that of the block before. The chain starts from the check of
the header of the records.
"""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from struct import Struct

from xxhash import xxh3_64_intdigest

from lightning_d9m.errors import LedgerError
from lightning_d9m.ledger.format.files import open_regular
from lightning_d9m.ledger.format.frames import (
    FramePosition,
    Frames,
    Layouts,
    check_position,
    measure_frames,
)
from lightning_d9m.ledger.format.records import FieldError

MAGIC = b"d9mprb2\n"
HEAD = Struct("<HHBB")
# Epoch, step and batch of the frame before the next one. The two last are -1 before the first.
POSITION = Struct("<qqq")
CHAIN_HASH = Struct("<Q")


def frames_path(path: Path) -> Path:
    """Return the file of frames that belongs to a file of records."""
    return path.with_suffix(".frames")


class FrameReader(AbstractContextManager["FrameReader"]):
    """Streams one rank's frames once, block by block.

    Args:
        path: The file.
        start: The check of the header of the rank's records, from which the chain starts.

    Attributes:
        size: Bytes of the file when it was opened; a run may still append to it.
        offset: Bytes that were read.
        truncated: Whether the last block is torn, as a killed run leaves it.

    Raises:
        LedgerError: When the file cannot be read or is not a file of frames; while reading, when a
            block was edited or is malformed.
    """

    def __init__(self, path: Path, start: str) -> None:
        self.path = path
        self._check = int(start, 16)
        self._position = FramePosition(0, -1, -1)
        self._stream = open_regular(path)
        self.size = os.fstat(self._stream.fileno()).st_size
        begin = self._stream.read(len(MAGIC))
        self.offset = len(begin)
        self.truncated = 0 < len(begin) < len(MAGIC)
        if not MAGIC.startswith(begin):
            self.close()
            raise LedgerError(
                f"{path} does not hold the digests of probes: it begins with {begin.hex()}. Copy "
                "it again together with the file rank-N.jsonl beside it."
            )

    @property
    def chain_hash(self) -> str:
        """The check of the last block that was read: 16 hex digits."""
        return f"{self._check:016x}"

    def read(self, end: int, layouts: Layouts, *, torn: bool = False) -> Iterator[Frames]:
        """Yield the frames up to a byte of the file, block by block.

        Args:
            end: The byte at which a block ends.
            layouts: The layouts that the blocks refer to.
            torn: Whether the last block may end beyond ``end``; it is left out.

        Raises:
            LedgerError: When a block was edited, is malformed, or ends beyond ``end``.
        """
        while self.offset < end and not self.truncated:
            try:
                yield from self._read_block(end, layouts, torn=torn)
            except FieldError as error:
                raise LedgerError(
                    f"{self.path}, the block at byte {self.offset}: {error}. The file was not "
                    "written by lightning_d9m, or was edited; record the run again."
                ) from error

    def close(self) -> None:
        """Close the file."""
        self._stream.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read_block(self, end: int, layouts: Layouts, *, torn: bool) -> Iterator[Frames]:
        """Yield the frames of a block, if it is whole and does not move the position only."""
        head = self._stream.read(HEAD.size)
        self.truncated = len(head) < HEAD.size
        if self.truncated:
            return
        layout, count, steps, batches = HEAD.unpack(head)
        places, token = layouts.get(layout, (0, b""))
        size = measure_frames(layout, count, batches, places) if count else POSITION.size
        if not count and (layout or steps or batches):
            raise FieldError("count", "is 0, and the rest of its head is not")
        stop = self.offset + HEAD.size + size + CHAIN_HASH.size
        if not torn and stop > end:
            raise FieldError("count", f"makes it end beyond byte {end}")
        body, stored = self._stream.read(size), self._stream.read(CHAIN_HASH.size)
        self.truncated = stop > end or len(stored) < CHAIN_HASH.size
        if self.truncated:
            return
        self._check = xxh3_64_intdigest(head + body, self._check)
        if CHAIN_HASH.unpack(stored) != (self._check,):
            raise LedgerError(
                f"{self.path}, the block at byte {self.offset} does not fit its check: it was "
                "edited, or a block before it was removed, added or moved. Nothing from here on "
                "can be trusted; take an unedited copy, or record the run again."
            )
        first = self._position.after(1, steps, batches)
        if count:
            self._position = self._position.after(count, steps, batches)
            for place in (first, self._position):
                check_position(place)
        else:
            self._position = FramePosition(*POSITION.unpack(body))
        self.offset = stop
        if count:
            yield Frames(*first, steps, batches, count, token, body)
