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
    data = b""
    if path.exists():
        with open_regular(path) as stream:
            data = stream.read()
    unfit = LedgerError(
        f"{path} does not fit the records beside it: it is missing, or was edited, cut or "
        "replaced. Copy both files, or record the run again."
    )
    if not MAGIC.startswith(data[: len(MAGIC)]):
        raise unfit
    blocks = _read_blocks(data, path, int(start, 16), layouts)
    at, check = len(MAGIC), start
    last: Record | None = None
    for last in records:
        if isinstance(last, FramesEnd):
            while at < last.bytes:
                at, check, frames = next(blocks, (last.bytes, "", []))
                yield from frames
            if (at, check) != (last.bytes, last.last):
                raise unfit
        yield last
    for at, check, frames in blocks:  # noqa: B007 - used after the loop
        if isinstance(last, End):
            raise unfit
        yield from frames
    return len(data) not in (0, len(MAGIC), at)


def _read_blocks(
    data: bytes, path: Path, check: int, layouts: Layouts
) -> Iterator[tuple[int, str, list[Batch]]]:
    """Yield the end, the check and the frames of each whole block, verified."""
    at, place = len(MAGIC), FramePosition(0, -1, -1)
    while len(data) - at > HEAD.size:
        layout, count, steps, batches = HEAD.unpack_from(data, at)
        places, token = layouts.get(layout, (0, b""))
        try:
            size = measure_frames(layout, count, batches, places) if count else POSITION.size
            first = at + HEAD.size
            stored = data[first + size : first + size + CHECK_SIZE]
            if len(stored) < CHECK_SIZE:
                return
            check = xxh3_64_intdigest(data[at : first + size], check)
            if stored != check.to_bytes(CHECK_SIZE, "little"):
                raise FieldError("check", "does not fit: it was edited")  # noqa: TRY301 - named above
            frames: list[Batch] = []
            if not count:
                place = FramePosition(*POSITION.unpack_from(data, first))
            for number in range(count):
                place = place.after(1, steps, batches)
                check_position(place)
                start, end = (first + size // count * n for n in (number, number + 1))
                frames.append(Batch(*place, (token,), data[start:end]))
        except FieldError as error:
            raise LedgerError(
                f"{path}, the block at byte {at}: {error}. The file was edited, or was not "
                "written by lightning_d9m; take an unedited copy, or record the run again."
            ) from error
        at = first + size + CHECK_SIZE
        yield at, f"{check:016x}", frames
