"""The file of frames that schema 2 has beside the records, read only.

It begins with ``MAGIC``. A block has a head (layout, number of frames, growth of the step and of
the batch from frame to frame), the frames or, if their number is 0, the position before the next
frame, and XXH3-64 of both, seeded with that of the block before. The first seed is the check of the
header of the records, among which a record ``frames`` says how many bytes precede it.
"""

from collections.abc import Generator, Iterator
from pathlib import Path
from struct import Struct
from typing import BinaryIO

from xxhash import xxh3_64_intdigest

from lightning_d9m.errors import LedgerError
from lightning_d9m.ledger.format.files import open_regular
from lightning_d9m.ledger.format.frames import (
    Batch,
    FramePosition,
    Layouts,
    check_position,
    measure_frames,
)
from lightning_d9m.ledger.format.records import End, FieldError, FramesEnd, Record

MAGIC = b"d9mprb2\n"
HEAD = Struct("<HHBB")
# Epoch, step and batch of the frame before the next one. The two last are -1 before the first.
POSITION = Struct("<qqq")
CHECK_SIZE = 8

# The byte after a block, its check, and its frames.
_Block = tuple[int, str, list[Batch]]


def add_frames(
    records: Iterator[Record], path: Path, start: str, layouts: Layouts
) -> Generator[Record | Batch, None, bool]:
    """Yield the records of a ledger with the frames that precede each.

    Args:
        records: The records after the header.
        path: Their file.
        start: The check of the header.
        layouts: The layouts of the records that were read so far.

    Returns:
        Whether the last block is torn, as a killed run leaves it.

    Raises:
        LedgerError: When the two files do not fit, or a block was edited or is malformed.
    """
    path = path.with_suffix(".frames")
    try:
        size = path.stat().st_size
    except OSError:
        size = 0
    blocks: Iterator[_Block] = _read_blocks(path, start, layouts) if size else iter(())
    at, check = len(MAGIC), start
    last: Record | None = None
    for last in records:
        if isinstance(last, FramesEnd):
            while at < last.bytes:
                at, check, frames = next(blocks, (last.bytes, "", []))
                yield from frames
            if (at, check) != (last.bytes, last.last):
                raise LedgerError(
                    f"{path} does not fit the records beside it, which refer to {last.bytes} bytes "
                    f"with the last check {last.last}: it is missing, or was cut or replaced. Copy "
                    "both files, or record the run again."
                )
        yield last
    for at, check, frames in blocks:  # noqa: B007 - used after the loop
        if isinstance(last, End):
            raise LedgerError(
                f"{path} continues after the end of the run. It or the file of the records was "
                "edited or replaced; take unedited copies, or record the run again."
            )
        yield from frames
    return size not in (0, len(MAGIC), at)


def _read_blocks(path: Path, start: str, layouts: Layouts) -> Iterator[_Block]:
    """Yield each whole block, verified."""
    check, before, at = int(start, 16), FramePosition(0, -1, -1), len(MAGIC)
    with open_regular(path) as stream:
        begin = stream.read(at)
        if not MAGIC.startswith(begin):
            raise LedgerError(
                f"{path} does not hold the digests of probes: it begins with {begin.hex()}. Copy "
                "it again together with the file rank-N.jsonl beside it."
            )
        while True:
            try:
                block = _read_block(stream, check, before, layouts)
            except FieldError as error:
                raise LedgerError(
                    f"{path}, the block at byte {at}: {error}. The file was edited, or was not "
                    "written by lightning_d9m; take an unedited copy, or record the run again."
                ) from error
            if block is None:
                return
            size, check, before, frames = block
            at += size
            yield at, f"{check:016x}", frames


def _read_block(
    stream: BinaryIO, check: int, before: FramePosition, layouts: Layouts
) -> tuple[int, int, FramePosition, list[Batch]] | None:
    """Return the size of a block, its check, its last position and its frames; None at the end."""
    head = stream.read(HEAD.size)
    if len(head) < HEAD.size:
        return None
    layout, count, steps, batches = HEAD.unpack(head)
    places, token = layouts.get(layout, (0, b""))
    if not count and (layout or steps or batches):
        raise FieldError("count", "is 0, and the rest of its head is not")
    size = measure_frames(layout, count, batches, places) if count else POSITION.size
    body, stored = stream.read(size), stream.read(CHECK_SIZE)
    if len(stored) < CHECK_SIZE:
        return None
    check = xxh3_64_intdigest(head + body, check)
    if stored != check.to_bytes(CHECK_SIZE, "little"):
        raise FieldError("check", "does not fit: a block was changed, removed, added or moved")
    frames: list[Batch] = []
    last = before if count else FramePosition(*POSITION.unpack(body))
    for number in range(count):
        last = last.after(1, steps, batches)
        check_position(last)
        digests = body[size // count * number : size // count * (number + 1)]
        frames.append(Batch(*last, (token,), digests))
    return HEAD.size + size + CHECK_SIZE, check, last, frames
