"""The reader of a file of frames: a stream of blocks whose hash chain is verified."""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xxhash import xxh3_64_intdigest

from lightning_d9m.errors import LedgerError
from lightning_d9m.ledger.format.fields import DIGEST_BYTES, MAX_WHOLE, WHOLE, FieldError
from lightning_d9m.ledger.format.opened_file import open_regular
from lightning_d9m.ledger.format.probe_frames import (
    CHAIN_HASH,
    FIRST_FRAME,
    HEAD,
    MAGIC,
    MAX_BLOCK,
    POSITION,
    Frames,
)
from lightning_d9m.ledger.format.probe_layouts import Layouts

if TYPE_CHECKING:
    from numpy import ndarray

_BUFFER = 2**18
# The least bytes of a block's frames that are returned together with those of the next blocks.
_TOGETHER = 2**17
# With fewer blocks, reading each takes less time than preparing to read them together.
_FEW_BLOCKS = 8


@dataclass(slots=True)
class _Run:
    """Frames of consecutive blocks of the same layout and growth."""

    layout: int
    growth: tuple[int, int]
    place: tuple[int, int, int]
    token: bytes
    width: int
    count: int = 0
    size: int = 0
    parts: list[memoryview] = field(default_factory=list)

    def takes(self, layout: int, growth: tuple[int, int]) -> bool:
        """Return whether the frames of the next block may be added."""
        return (self.layout, self.growth) == (layout, growth) and self.size < _TOGETHER

    def add(self, count: int, part: memoryview) -> None:
        """Add some frames."""
        self.count += count
        self.size += part.nbytes
        self.parts.append(part)
        if not self.growth[1]:  # a part of a batch continues nothing
            self.size = _TOGETHER

    def as_frames(self) -> Frames:
        """Return the frames."""
        data = b"".join(self.parts)
        return Frames(*self.place, *self.growth, self.count, self.token, self.width, data)


class FrameReader(AbstractContextManager["FrameReader"]):
    """Streams one rank's frames once; memory is bounded by a few blocks.

    Args:
        path: The file.
        start: The check of the header of the rank's records, from which the chain starts.

    Attributes:
        size: Bytes of the file when it was opened; a run may still append to it.
        truncated: Whether the last block is torn, as a killed run leaves it.

    Raises:
        LedgerError: When the file cannot be read or is not a file of frames; while reading, when a
            block was edited or is malformed.
    """

    def __init__(self, path: Path, start: str) -> None:
        self.path = path
        self._check = int(start, 16)
        self._position: tuple[int, int, int] = FIRST_FRAME
        self._stream = open_regular(path)
        self.size = os.fstat(self._stream.fileno()).st_size
        # Bytes of the file, where they begin in it, and where the next block begins in them.
        self._data = self._stream.read(_BUFFER)
        self._base = 0
        self._at = min(len(MAGIC), len(self._data))
        self.truncated = 0 < self._at < len(MAGIC)
        if self._data[: len(MAGIC)] != MAGIC[: self._at]:
            self.close()
            raise LedgerError(
                f"{path} does not hold the digests of probes: it begins with "
                f"{self._data[:16].hex()}. Copy it again together with the file rank-N.jsonl "
                "beside it."
            )

    @property
    def offset(self) -> int:
        """Bytes that were read."""
        return self._base + self._at

    @property
    def chain_hash(self) -> str:
        """The check of the last block that was read: 16 hex digits."""
        return f"{self._check:016x}"

    def read(self, end: int, layouts: Layouts, *, torn: bool = False) -> Iterator[Frames]:
        """Yield the frames up to a byte of the file, those of consecutive blocks together.

        Args:
            end: The byte at which a block ends.
            layouts: The layouts that the blocks refer to.
            torn: Whether the last block may end beyond ``end``; it is left out.

        Raises:
            LedgerError: When a block was edited, is malformed, or ends beyond ``end``.
        """
        # This runs for each block, of which a trace may have millions: most have the same head as
        # the block before, and continue its run.
        run: _Run | None = None
        head, size, count, growth = b"", HEAD.size, 0, (0, 0)
        while self.offset < end:
            self._fill(size + CHAIN_HASH.size)
            found = self._data[self._at : self._at + HEAD.size]
            if found != head or run is None or run.size >= _TOGETHER:
                if len(found) < HEAD.size:
                    self.truncated = True
                    break
                head = found
                layout, count, *grown = HEAD.unpack(head)
                growth = grown[0], grown[1]
                size = HEAD.size + self._measure(layout, count, layouts, growth)
                if run is not None and not (count and run.takes(layout, growth)):
                    yield run.as_frames()
                    run = None
                self._fill(size + CHAIN_HASH.size)
            if not self._verify(size, end, torn=torn):
                break
            start, stop = self._at + HEAD.size, self._at + size
            if count:
                place = self._move(count, growth)
                if run is None:
                    width = (size - HEAD.size) // count
                    run = _Run(layout, growth, place, layouts.get(layout), width)
                run.add(count, memoryview(self._data)[start:stop])
                self._at = stop + CHAIN_HASH.size
                self._read_alike(run, head, count, end)
            else:
                self._position = POSITION.unpack_from(self._data, start)
                self._at = stop + CHAIN_HASH.size
                head = b""
        if run is not None:
            yield run.as_frames()

    def close(self) -> None:
        """Close the file."""
        self._stream.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _fill(self, size: int) -> None:
        """Hold at least ``size`` of the next bytes; fewer only at the end of the file."""
        if len(self._data) - self._at < size:
            self._base += self._at
            rest = self._data[self._at :]
            self._data = rest + self._stream.read(max(size - len(rest), _BUFFER))
            self._at = 0

    def _measure(self, layout: int, count: int, layouts: Layouts, growth: tuple[int, int]) -> int:
        """Return the bytes between head and check of a block."""
        size = count * layouts.size(layout) * DIGEST_BYTES
        if not count:
            if layout or any(growth):
                raise self._malformed("count", "is 0, and the rest of its head is not")
            return POSITION.size
        if not size:
            unknown = f"is {layout}, and no record before it says what that is"
            raise self._malformed("layout", unknown)
        if size > MAX_BLOCK:
            raise self._malformed("count", f"is {count}, which makes more than {MAX_BLOCK} bytes")
        if count > 1 and not growth[1]:
            raise self._malformed("batches", f"must be at least 1 for {count} frames, and is 0")
        return size

    def _verify(self, size: int, end: int, *, torn: bool) -> bool:
        """Check the hash of the next block; return whether it is whole."""
        stop = self._at + size
        beyond = self._base + stop + CHAIN_HASH.size > end
        if beyond and not torn:
            raise self._malformed("count", f"makes it end beyond byte {end}")
        if beyond or len(self._data) < stop + CHAIN_HASH.size:
            self.truncated = True
            return False
        check = xxh3_64_intdigest(memoryview(self._data)[self._at : stop], self._check)
        if CHAIN_HASH.unpack_from(self._data, stop)[0] != check:
            raise LedgerError(
                f"{self.path}, the block at byte {self.offset} does not fit its check: it was "
                "edited, or a block before it was removed, added or moved. Nothing from here on "
                "can be trusted; take an unedited copy, or record the run again."
            )
        self._check = check
        return True

    def _read_alike(self, run: _Run, head: bytes, count: int, end: int) -> None:
        """Add the next blocks to a run as long as they have the head of the block before.

        Only the check of each block needs a call; all else is done for all of them. What ends the
        run, or is wrong, is left for ``read``.
        """
        if not self._data.startswith(head, self._at):
            return
        size = HEAD.size + run.width * count
        stride = size + CHAIN_HASH.size
        blocks = (min(len(self._data), end - self._base) - self._at) // stride
        blocks = min(blocks, -(-(_TOGETHER - run.size) // (run.width * count)))
        if blocks < _FEW_BLOCKS:
            return
        import numpy as np

        view = memoryview(self._data)[self._at : self._at + blocks * stride]
        rows = np.frombuffer(view, np.uint8).reshape(blocks, stride)
        blocks = _count_true((rows[:, : HEAD.size] == rows[0, : HEAD.size]).all(axis=1))
        check, checks = self._check, []
        for start in range(0, blocks * stride, stride):
            check = xxh3_64_intdigest(view[start : start + size], check)
            checks.append(check)
        stored = rows[:blocks, size:].copy().view("<u8")[:, 0]
        blocks = _count_true(np.array(checks, "<u8") == stored)
        epoch, step, batch = self._position
        steps, batches = (growth * count * blocks for growth in run.growth)
        if not blocks or max(step + steps, batch + batches) > MAX_WHOLE:
            return
        self._position = epoch, step + steps, batch + batches
        self._check = checks[blocks - 1]
        self._at += blocks * stride
        run.add(count * blocks, memoryview(rows[:blocks, HEAD.size : size].tobytes()))

    def _move(self, count: int, growth: tuple[int, int]) -> tuple[int, int, int]:
        """Move the position behind some frames; return that of the first of them."""
        epoch, step, batch = self._position
        steps, batches = growth
        place = epoch, step + steps, batch + batches
        last = self._position = epoch, step + steps * count, batch + batches * count
        if min(place) < 0 or max(last) > MAX_WHOLE:
            try:
                for name, first, final in zip(("epoch", "step", "batch"), place, last, strict=True):
                    WHOLE.read(name, first if first < 0 else final)
            except FieldError as error:
                raise self._malformed(error.field, error.problem) from error
        return place

    def _malformed(self, field: str, problem: str) -> LedgerError:
        return LedgerError(
            f"{self.path}, the block at byte {self.offset}: {FieldError(field, problem)}. The file "
            "was not written by lightning_d9m, or was edited; record the run again."
        )


def _count_true(conditions: "ndarray[Any, Any]") -> int:
    """Return how many conditions are true before the first that is not."""
    return len(conditions) if conditions.all() else int(conditions.argmin())
