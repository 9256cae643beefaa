"""Frames: the digests of the probes of consecutive batches, and the layouts of their places."""

import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, TypeAlias

from lightning_d9m.ledger.format.records import (
    DIGEST_BYTES,
    MAX_WHOLE,
    FieldError,
    ProbeKey,
    ProbesRecord,
)

# The most bytes of digests in one record; a layout of the most places needs a quarter of it.
MAX_BLOCK = 2**20
MAX_LAYOUTS = 2**16
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


@dataclass(slots=True)
class Batch:
    """The digests of one batch, or of some of its places.

    Attributes:
        epoch: Counted from 0.
        step: The global step when the batch began.
        batch: Index within the epoch.
        layouts: The token of the layout of each part, which names the places.
        digests: The digests in order of execution, 16 bytes each.
        offset: Number of places of the batch before these.
    """

    epoch: int
    step: int
    batch: int
    layouts: tuple[bytes, ...]
    digests: bytes
    offset: int = 0

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


def split_frames(record: ProbesRecord, layout: bytes) -> Iterator[Batch]:
    """Yield each batch of a record, given the token of its layout."""
    place = FramePosition(record.epoch, record.step, record.batch)
    width = len(record.digests) // record.count
    for number in range(record.count):
        digests = record.digests[number * width : (number + 1) * width]
        yield Batch(*place.after(number, record.steps, record.batches), (layout,), digests)


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


def check_frames(record: ProbesRecord, places: int) -> None:
    """Check that frames fit their layout and a block.

    Args:
        record: The frames.
        places: Number of places of the layout; 0 when it is unknown.

    Raises:
        FieldError: When they do not.
    """
    size = measure_frames(record.layout, record.count, record.batches, places)
    if record.layout >= MAX_LAYOUTS:
        raise FieldError("layout", f"must be below {MAX_LAYOUTS}, and is {record.layout}")
    if len(record.digests) != size:
        raise FieldError(
            "digests",
            f"must be {record.count * places} digests of {DIGEST_BYTES} bytes, one for each place "
            f"of its layout, and has {len(record.digests)} bytes",
        )
    place = FramePosition(record.epoch, record.step, record.batch)
    check_position(place.after(record.count - 1, record.steps, record.batches))


def measure_frames(layout: int, count: int, batches: int, places: int) -> int:
    """Return the bytes of the digests of some frames."""
    if not places:
        raise FieldError("layout", f"is {layout}, and no record before it says what that is")
    size = count * places * DIGEST_BYTES
    if size > MAX_BLOCK:
        raise FieldError("count", f"is {count}, which makes more than {MAX_BLOCK} bytes of digests")
    if count > 1 and not batches:
        raise FieldError("batches", f"must be at least 1 for {count} frames, and is 0")
    return size


def check_position(place: FramePosition) -> None:
    """Raise a ``FieldError`` if a position is out of bounds."""
    for name, value in zip(place._fields, place, strict=True):
        if not 0 <= value <= MAX_WHOLE:
            raise FieldError(name, f"must be a whole number from 0 to {MAX_WHOLE}, and is {value}")
