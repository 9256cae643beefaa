"""The reader of a file of frames: a stream of blocks whose hash chain is verified."""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

from xxhash import xxh3_64_intdigest

from lightning_d9m.errors import LedgerError
from lightning_d9m.ledger.opened_file import open_regular
from lightning_d9m.ledger.probe_frames import (
    CHECK,
    DIGEST_BYTES,
    HEAD,
    MAGIC,
    MAX_BLOCK,
    POSITION,
    START,
    FramePosition,
    Frames,
)
from lightning_d9m.ledger.probe_layouts import Layouts
from lightning_d9m.ledger.schema import MAX_WHOLE, FieldError

_BUFFER = 2**18
# The least bytes of a block's frames that are returned together with those of the next blocks.
_TOGETHER = 2**17


class FrameReader(AbstractContextManager["FrameReader"]):
    """Streams one rank's frames once; memory is bounded by a few blocks.

    Args:
        path: The file.
        start: The check of the header of the rank's records, from which the chain starts.

    Attributes:
        size: Bytes of the file when it was opened; a run may still append to it.
        offset: Bytes that were read.
        chain_hash: The check of the last block that was read: 16 hex digits.
        truncated: Whether the last block is torn, as a killed run leaves it.

    Raises:
        LedgerError: When the file cannot be read or is not a file of frames; while reading, when a
            block was edited or is malformed.
    """

    def __init__(self, path: Path, start: str) -> None:
        self.path = path
        self._check = int(start, 16)
        self._position = START
        self._stream = open_regular(path)
        self.size = os.fstat(self._stream.fileno()).st_size
        self._data = b""
        self._at = self.offset = 0
        found = self._peek(len(MAGIC))
        if found[: len(MAGIC)] != MAGIC[: len(found)]:
            self.close()
            raise LedgerError(
                f"{path} does not hold the digests of probes: it begins with {found[:16].hex()}. "
                "Copy it again together with the file rank-N.jsonl beside it."
            )
        self._at = self.offset = len(found[: len(MAGIC)])
        self.truncated = 0 < self.offset < len(MAGIC)

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
        run: Frames | None = None
        parts: list[bytes] = []
        size = 0
        while (block := self._read_block(end, layouts, torn=torn)) is not None:
            if run is not None and size < _TOGETHER and _continues(run, block):
                count = run.count + block.count
                run = replace(run, count=count)
            else:
                if run is not None:
                    yield _join(run, parts)
                run, parts, size = block, [], 0
            parts.append(block.data)
            size += len(block.data)
        if run is not None:
            yield _join(run, parts)

    def close(self) -> None:
        """Close the file."""
        self._stream.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read_block(self, end: int, layouts: Layouts, *, torn: bool) -> Frames | None:
        """Read the next block of frames; None at ``end`` and at the end of the file."""
        while self.offset < end:
            data = self._peek(HEAD.size)
            if len(data) < HEAD.size:
                self.truncated = True
                return None
            layout, count, *growth = HEAD.unpack_from(data)
            try:
                size = HEAD.size + _measure(layout, count, layouts, growth)
                if not torn:
                    _check_end(count, self.offset + size + CHECK.size, end)
                data = self._peek(size + CHECK.size)
                if len(data) < size + CHECK.size or self.offset + size + CHECK.size > end:
                    self.truncated = True
                    return None
                self._verify(data[:size], data[size:])
                if count:
                    found = self._place(data[:size], count, growth, layouts.get(layout))
                else:
                    self._position = FramePosition(*POSITION.unpack_from(data, HEAD.size))
            except FieldError as error:
                raise LedgerError(
                    f"{self.path}, the block at byte {self.offset}: {error}. The file was not "
                    "written by lightning_d9m, or was edited; record the run again."
                ) from error
            self._at += size + CHECK.size
            self.offset += size + CHECK.size
            if count:
                return found
        return None

    def _verify(self, body: memoryview, check: memoryview) -> None:
        found = xxh3_64_intdigest(body, self._check)
        if CHECK.unpack_from(check)[0] != found:
            raise LedgerError(
                f"{self.path}, the block at byte {self.offset} does not fit its check: it was "
                "edited, or a block before it was removed, added or moved. Nothing from here on "
                "can be trusted; take an unedited copy, or record the run again."
            )
        self._check = found

    def _place(self, body: memoryview, count: int, growth: list[int], layout: bytes) -> Frames:
        """Return the frames of a block at their position, and move it."""
        steps, batches = growth
        epoch, step, batch = self._position
        last = FramePosition(epoch, step + steps * count, batch + batches * count)
        for name, first, final in (
            ("epoch", epoch, epoch),
            ("step", step + steps, last.step),
            ("batch", batch + batches, last.batch),
        ):
            if first < 0 or final > MAX_WHOLE:
                found = first if first < 0 else final
                raise FieldError(
                    name, f"must be a whole number from 0 to {MAX_WHOLE}, and is {found}"
                )
        self._position = last
        place = (epoch, step + steps, batch + batches)
        data = bytes(body[HEAD.size :])
        return Frames(*place, steps, batches, count, layout, len(data) // count, data)

    def _peek(self, size: int) -> memoryview:
        """Return at least ``size`` of the next bytes; fewer only at the end of the file."""
        if len(self._data) - self._at < size:
            rest = self._data[self._at :]
            self._data = rest + self._stream.read(max(size - len(rest), _BUFFER))
            self._at = 0
        return memoryview(self._data)[self._at :]


def _measure(layout: int, count: int, layouts: Layouts, growth: list[int]) -> int:
    """Return the bytes between head and check of a block."""
    if not count:
        if layout or any(growth):
            raise FieldError("count", "is 0, and the rest of its head is not")
        return POSITION.size
    size = count * layouts.size(layout) * DIGEST_BYTES
    if not size:
        raise FieldError("layout", f"is {layout}, and no record before it says what that is")
    if size > MAX_BLOCK:
        raise FieldError("count", f"is {count}, which makes more than {MAX_BLOCK} bytes")
    if count > 1 and not growth[1]:
        raise FieldError("batches", f"must be at least 1 for {count} frames, and is 0")
    return size


def _check_end(count: int, reached: int, end: int) -> None:
    if reached > end:
        raise FieldError("count", f"is {count}, which makes it end beyond byte {end}")


def _position(frames: Frames) -> tuple[int, int, int]:
    return frames.epoch, frames.step, frames.batch


def _continues(run: Frames, block: Frames) -> bool:
    """Return whether a block continues frames of the same layout and growth."""
    growth = run.steps, run.batches
    if growth != (block.steps, block.batches) or not run.batches or run.layout != block.layout:
        return False
    follows = run.epoch, run.step + run.steps * run.count, run.batch + run.batches * run.count
    return follows == _position(block)


def _join(run: Frames, parts: list[bytes]) -> Frames:
    return run if len(parts) == 1 else replace(run, data=b"".join(parts))
