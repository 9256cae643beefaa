"""Frames: the digests of the probes of consecutive batches, in blocks whose hash chain is verified.

docs/ledger.md describes the file for readers in other languages.
"""

import json
import os
import stat
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from struct import Struct
from typing import BinaryIO, NamedTuple, TypeAlias

from xxhash import xxh3_64_intdigest

from lightning_d9m.errors import LedgerError
from lightning_d9m.file_errors import explain_file_error
from lightning_d9m.ledger.format.records import (
    DIGEST_BYTES,
    MAX_GROWTH,
    MAX_WHOLE,
    FieldError,
    ProbeKey,
    ProbesRecord,
)

MAGIC = b"d9mprb2\n"
# The most bytes of digests in one block; a layout of the most places needs a quarter of it.
MAX_BLOCK = 2**20
MAX_LAYOUTS = 2**16
# Layout, number of frames, growth of the step and of the batch from frame to frame.
HEAD = Struct("<HHBB")
# Epoch, step and batch of the frame before the next one. The two last are -1 before the first.
POSITION = Struct("<qqq")
CHAIN_HASH = Struct("<Q")
# Number of places and token of each layout, by its number.
Layouts: TypeAlias = Mapping[int, tuple[int, bytes]]


class FramePosition(NamedTuple):
    """The batch of a frame."""

    epoch: int
    step: int
    batch: int

    def after(self, count: int, steps: int, batches: int) -> "FramePosition":
        """Return the position after so many frames with a growth."""
        return FramePosition(self.epoch, self.step + count * steps, self.batch + count * batches)


FIRST_FRAME = FramePosition(0, -1, -1)


@dataclass(slots=True)
class Frames:
    """The digests at the same places of consecutive batches: one frame for each.

    Attributes:
        epoch: Counted from 0.
        step: The global step when the first batch began.
        batch: Index of the first batch within the epoch.
        steps: Growth of the step from frame to frame.
        batches: Growth of the batch; 0 only for a single frame.
        count: Number of frames.
        layout: The token of the layout, which names the places.
        digests: The bytes of the frames, one after another.
    """

    epoch: int
    step: int
    batch: int
    steps: int
    batches: int
    count: int
    layout: bytes
    digests: bytes

    @property
    def width(self) -> int:
        """Bytes of a frame: 16 for each place."""
        return len(self.digests) // self.count

    @property
    def size(self) -> int:
        """Number of places, of all frames."""
        return len(self.digests) // DIGEST_BYTES

    def split(self) -> Iterator["Frames"]:
        """Yield each frame."""
        for number in range(self.count):
            at = self.width * number
            step, batch = self.step + self.steps * number, self.batch + self.batches * number
            place = self.epoch, step, batch, self.steps, self.batches
            yield Frames(*place, 1, self.layout, self.digests[at : at + self.width])


def pack_places(places: Iterable[ProbeKey]) -> bytes:
    """Return the token of a layout: equal for two layouts exactly when their places are equal.

    It is compressed: a trace may have millions of places.
    """
    return zlib.compress(json.dumps([*places], separators=(",", ":")).encode("ascii"), 1)


# A training has few layouts, which recur.
@lru_cache(maxsize=16)
def unpack_places(token: bytes) -> tuple[ProbeKey, ...]:
    """Return the places, in order of execution, of the layout with this token."""
    entries = json.loads(zlib.decompress(token))
    return tuple((kind, name, call) for kind, name, call in entries)


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading; refuse a pipe or a device, which might never end."""
    try:
        # Without O_NONBLOCK, opening a named pipe waits for its writer.
        number = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        raise LedgerError(f"{path} cannot be read: {explain_file_error(error)}") from error
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise LedgerError(
            f"{path} is not a ledger: it is not a regular file. Name a folder fit-NNN or a file "
            "rank-N.jsonl."
        )
    return os.fdopen(number, "rb", buffering=2**20)


def frames_path(path: Path) -> Path:
    """Return the file of frames that belongs to a file of records."""
    return path.with_suffix(".frames")


def check_frames(record: ProbesRecord, places: int) -> None:
    """Check that frames fit their layout and a block.

    Args:
        record: The frames.
        places: Number of places of the layout; 0 when it is unknown.

    Raises:
        FieldError: When they do not.
    """
    size = _measure(record.layout, record.count, record.batches, places)
    if record.layout >= MAX_LAYOUTS:
        raise FieldError("layout", f"must be below {MAX_LAYOUTS}, and is {record.layout}")
    if len(record.digests) != size:
        raise FieldError(
            "digests",
            f"must be {record.count * places} digests of {DIGEST_BYTES} bytes, one for each place "
            f"of its layout, and has {len(record.digests)} bytes",
        )
    place = FramePosition(record.epoch, record.step, record.batch)
    _check_position(place.after(record.count - 1, record.steps, record.batches))


def _measure(layout: int, count: int, batches: int, places: int) -> int:
    """Return the bytes of the digests of some frames."""
    if not places:
        raise FieldError("layout", f"is {layout}, and no record before it says what that is")
    size = count * places * DIGEST_BYTES
    if size > MAX_BLOCK:
        raise FieldError("count", f"is {count}, which makes more than {MAX_BLOCK} bytes of digests")
    if count > 1 and not batches:
        raise FieldError("batches", f"must be at least 1 for {count} frames, and is 0")
    return size


def _check_position(place: FramePosition) -> None:
    for name, value in zip(place._fields, place, strict=True):
        if not 0 <= value <= MAX_WHOLE:
            raise FieldError(name, f"must be a whole number from 0 to {MAX_WHOLE}, and is {value}")


def encode_frames(
    record: ProbesRecord, before: FramePosition, check: int
) -> tuple[bytes, FramePosition, int]:
    """Return (the blocks of frames, the position of the last, the last block's check).

    Args:
        record: The frames, which were checked.
        before: The position of the frame before them.
        check: The check of the block before them.
    """
    steps, batches = record.steps, record.batches
    if record.count == 1:
        steps, batches = record.step - before.step, record.batch - before.batch
        if not (0 <= steps <= MAX_GROWTH and 0 <= batches <= MAX_GROWTH):
            steps = batches = 1
    blocks = b""
    expected = FramePosition(record.epoch, record.step - steps, record.batch - batches)
    if expected != before:
        body = HEAD.pack(0, 0, 0, 0) + POSITION.pack(*expected)
        check = xxh3_64_intdigest(body, check)
        blocks = body + CHAIN_HASH.pack(check)
    body = HEAD.pack(record.layout, record.count, steps, batches) + record.digests
    check = xxh3_64_intdigest(body, check)
    after = expected.after(record.count, steps, batches)
    return blocks + body + CHAIN_HASH.pack(check), after, check


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
        self._position = FIRST_FRAME
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
        size = _measure(layout, count, batches, places) if count else POSITION.size
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
                _check_position(place)
        else:
            self._position = FramePosition(*POSITION.unpack(body))
        self.offset = stop
        if count:
            yield Frames(*first, steps, batches, count, token, body)


@dataclass(slots=True)
class Batch:
    """The digests of one batch, or of some of its places: consecutive frames.

    Attributes:
        epoch: Counted from 0.
        step: The global step when the batch began.
        batch: Index within the epoch.
        offset: Number of places of the batch before these.
        layouts: The token of the layout of each frame.
        digests: The digests in order of execution, 16 bytes each.
    """

    epoch: int
    step: int
    batch: int
    offset: int
    layouts: tuple[bytes, ...]
    digests: bytes

    @property
    def size(self) -> int:
        """Number of places."""
        return len(self.digests) // DIGEST_BYTES

    def list_places(self) -> list[ProbeKey]:
        """Return the places in order of execution."""
        return [place for token in self.layouts for place in unpack_places(token)]

    def list_digests(self) -> list[bytes]:
        """Return the digest at each place."""
        data = self.digests
        return [data[at : at + DIGEST_BYTES] for at in range(0, len(data), DIGEST_BYTES)]
