"""The file of frames that schema 2 has beside the records, read only.

It begins with ``MAGIC``. A block has a head (layout, number of frames, growth of the step and of
the batch from frame to frame), the frames or, if their number is 0, the position before the next
frame, and XXH3-64 of both, seeded with that of the block before. The first seed is the check of the
header of the records, among which a record ``frames`` says how many bytes precede it.
"""

from collections.abc import Generator, Iterator
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
from lightning_d9m.ledger.format.records import End, FieldError, FramesEnd, Record

MAGIC = b"d9mprb2\n"
HEAD = Struct("<HHBB")
# Epoch, step and batch of the frame before the next one. The two last are -1 before the first.
POSITION = Struct("<qqq")
CHAIN_HASH = Struct("<Q")

# The byte after a block, its check, and its frames, if it does not only move the position.
_Block = tuple[int, str, Frames | None]


def add_frames(
    records: Iterator[Record], path: Path, start: str, layouts: Layouts
) -> Generator[Record | Frames, None, bool]:
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
                at, check, frames = next(blocks, (last.bytes, "", None))
                if frames is not None:
                    yield frames
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
        if frames is not None:
            yield frames
    return size not in (0, len(MAGIC), at)


def _read_blocks(path: Path, start: str, layouts: Layouts) -> Iterator[_Block]:
    """Yield each whole block, verified."""
    chain, position, at = int(start, 16), FramePosition(0, -1, -1), len(MAGIC)
    with open_regular(path) as stream:
        begin = stream.read(at)
        if not MAGIC.startswith(begin):
            raise LedgerError(
                f"{path} does not hold the digests of probes: it begins with {begin.hex()}. Copy "
                "it again together with the file rank-N.jsonl beside it."
            )
        while len(head := stream.read(HEAD.size)) == HEAD.size:
            layout, count, steps, batches = HEAD.unpack(head)
            places, token = layouts.get(layout, (0, b""))
            try:
                size = _measure(layout, count, steps, batches, places)
                body, stored = stream.read(size), stream.read(CHAIN_HASH.size)
                if len(stored) < CHAIN_HASH.size:
                    return
                chain = _check_block(head + body, stored, chain)
                first = position.after(1, steps, batches)
                position = position.after(count, steps, batches)
                if not count:
                    position = FramePosition(*POSITION.unpack(body))
                for place in (first, position) if count else ():
                    check_position(place)
            except FieldError as error:
                raise LedgerError(
                    f"{path}, the block at byte {at}: {error}. The file was edited, or was not "
                    "written by lightning_d9m; take an unedited copy, or record the run again."
                ) from error
            at += HEAD.size + size + CHAIN_HASH.size
            frames = Frames(*first, steps, batches, count, token, body) if count else None
            yield at, f"{chain:016x}", frames


def _measure(layout: int, count: int, steps: int, batches: int, places: int) -> int:
    """Return the bytes between the head and the check of a block."""
    if count:
        return measure_frames(layout, count, batches, places)
    if layout or steps or batches:
        raise FieldError("count", "is 0, and the rest of its head is not")
    return POSITION.size


def _check_block(block: bytes, stored: bytes, chain: int) -> int:
    """Return the check of a block, given that of the block before it."""
    check = xxh3_64_intdigest(block, chain)
    if CHAIN_HASH.unpack(stored) != (check,):
        raise FieldError("check", "does not fit: a block was changed, removed, added or moved")
    return check
