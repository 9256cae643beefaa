"""Frames: the digests of the probes of consecutive batches, and the blocks that hold them.

docs/ledger.md describes the file for readers in other languages.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from struct import Struct
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from lightning_d9m.ledger.format.fields import DIGEST_BYTES, WHOLE, FieldError
from lightning_d9m.ledger.format.records import MAX_GROWTH, ProbesRecord

MAGIC = b"d9mprb2\n"
# The most bytes of digests in one block; a layout of the most places needs a quarter of it.
MAX_BLOCK = 2**20
MAX_LAYOUTS = 2**16
# Layout, number of frames, growth of the step and of the batch from frame to frame.
HEAD = Struct("<HHBB")
# Epoch, step and batch of the frame before the next one. The two last are -1 before the first.
POSITION = Struct("<qqq")
CHAIN_HASH = Struct("<Q")


class FramePosition(NamedTuple):
    """The batch of a frame."""

    epoch: int
    step: int
    batch: int


FIRST_FRAME = FramePosition(0, -1, -1)


@dataclass(frozen=True, slots=True)
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
        width: Bytes of a frame: 16 for each place.
        data: Bytes that hold the frames, one after another.
        start: Index of the first of their bytes.
    """

    epoch: int
    step: int
    batch: int
    steps: int
    batches: int
    count: int
    layout: bytes
    width: int
    data: bytes
    start: int = 0

    @property
    def digests(self) -> bytes:
        """The bytes of the frames."""
        return self.data[self.start : self.start + self.width * self.count]

    @property
    def size(self) -> int:
        """Number of places, of all frames."""
        return self.width // DIGEST_BYTES * self.count

    @property
    def last_batch(self) -> int:
        """Index of the last batch."""
        return self.batch + self.batches * (self.count - 1)

    def take(self, start: int, stop: int) -> "Frames":
        """Return the frames from ``start`` up to ``stop``."""
        if start == 0 and stop == self.count:
            return self
        return replace(
            self,
            step=self.step + self.steps * start,
            batch=self.batch + self.batches * start,
            count=stop - start,
            start=self.start + self.width * start,
        )

    def split(self) -> Iterator["Frames"]:
        """Yield each frame."""
        return (self.take(number, number + 1) for number in range(self.count))


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
    if not places:
        unknown = f"is {record.layout}, and no record before it says what that is"
        raise FieldError("layout", unknown)
    if record.layout >= MAX_LAYOUTS:
        raise FieldError("layout", f"must be below {MAX_LAYOUTS}, and is {record.layout}")
    if len(record.digests) != record.count * places * DIGEST_BYTES:
        allowed = f"must be {record.count * places} digests of {DIGEST_BYTES} bytes"
        raise FieldError(
            "digests",
            f"{allowed}, one for each place of its layout, and has {len(record.digests)} bytes",
        )
    if len(record.digests) > MAX_BLOCK:
        found = f"must have at most {MAX_BLOCK} bytes, and has {len(record.digests)}"
        raise FieldError("digests", found)
    if record.count > 1 and not record.batches:
        raise FieldError("batches", f"must be at least 1 for {record.count} frames, and is 0")
    for name, last in (
        ("step", record.step + record.steps * (record.count - 1)),
        ("batch", record.batch + record.batches * (record.count - 1)),
    ):
        WHOLE.read(name, last)


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
    grown = record.count * steps, record.count * batches
    after = FramePosition(record.epoch, expected.step + grown[0], expected.batch + grown[1])
    return blocks + body + CHAIN_HASH.pack(check), after, check
