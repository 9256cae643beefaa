"""The reader of one rank's ledger: a stream of records whose hash chain is verified.

Each line is a record whose last field is ``"check"``, the chain hash: BLAKE2b with 8 bytes over the
chain hash of the previous line (16 zeros before the first) and the bytes of this line that precede
``,"check":``. The chain finds accidents and naive edits: a record that was changed, removed, added
or moved. It is not a signature: anyone can recompute it.

The digests of probes are frames in a file of their own. A record ``frames`` says how many bytes of
them precede the next record; those after the last such record come at the end.
"""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import cast

from lightning_d9m.errors import LedgerError
from lightning_d9m.ledger.format.frames import (
    FrameReader,
    Frames,
    Layouts,
    check_frames,
    frames_path,
    open_regular,
)
from lightning_d9m.ledger.format.records import (
    CHAIN_START,
    MAX_HEADER,
    MAX_LINE,
    SCHEMA,
    Digests,
    End,
    FieldError,
    FramesEnd,
    Header,
    ProbeLayout,
    ProbesRecord,
    Record,
    chain_record,
    decode_record,
    kind_prefix,
)
from lightning_d9m.text import quote

_HEADER, _END = kind_prefix(Header), kind_prefix(End)
_FRAMES, _LAYOUT = kind_prefix(FramesEnd), kind_prefix(ProbeLayout)
_PROBES = kind_prefix(ProbesRecord)
ABOUT_FRAMES = (_FRAMES, _LAYOUT, _PROBES)
_TAIL = len(b',"check":"0123456789abcdef"}\n')


class RankReader(AbstractContextManager["RankReader"]):
    """Streams one rank's file once, verifying the chain; memory is bounded by the longest record.

    Attributes:
        path: The file of the records.
        header: Its first record.
        line: Number of the line that was read last, from 1.
        truncated: Whether the last line is torn, as a killed run leaves it. Set at the end of the
            file.
        complete: Whether the last record is an ``End``. Set at the end of the file.

    Raises:
        LedgerError: When the file cannot be read, is not a ledger, or has a newer schema; while
            reading, when a record was edited or breaks the schema.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.line = 0
        self.truncated = False
        self.complete = False
        self._layouts = Layouts()
        self._chain_hash = self._start = CHAIN_START
        self._stream = open_regular(path)
        try:
            self.header = self._read_header()
        except BaseException:
            self.close()
            raise

    @property
    def chain_hash(self) -> str:
        """The chain hash of the record that was read last: 16 hex digits."""
        return self._chain_hash.decode()

    def bodies(self) -> Iterator[bytes]:
        """Yield the JSON text of each record after the header, verified but not parsed."""
        body = b""
        for line in iter(partial(self._stream.readline, MAX_LINE + 1), b""):
            if not line.endswith(b"\n"):
                if len(line) > MAX_LINE:
                    raise LedgerError(
                        f"{self.path}, line {self.line + 1} is longer than {MAX_LINE} bytes, the "
                        "most that a record may have. The file was not written by lightning_d9m, "
                        "or was edited."
                    )
                self.truncated = True
                break
            self.line += 1
            body = line[:-_TAIL] + b"}"
            expected, chain_hash = chain_record(body, self._chain_hash)
            if line != expected:
                raise self._broken(line)
            self._chain_hash = chain_hash
            if not body.startswith(b'{"kind":"'):
                self.parse(body)  # says what is wrong
            yield body
        self.complete = body.startswith(_END)

    def entries(self, *, lines_only: bool = False) -> Iterator[bytes | Frames]:
        """Yield the JSON text of each record after the header, and frames in order among them.

        The text of a record that is about frames (``ABOUT_FRAMES``) comes after them. With
        ``lines_only``, the file of frames is not read.
        """
        if lines_only:
            yield from self.bodies()
            return
        path = frames_path(self.path)
        exists = os.path.exists(path)  # noqa: PTH110 - a name that is too long does not exist
        frames = FrameReader(path, self._start.decode()) if exists else None
        try:
            for body in self.bodies():
                if body.startswith(_FRAMES):
                    yield from self._frames_before(body, frames)
                elif body.startswith(_LAYOUT):
                    self.parse(body)
                elif body.startswith(_PROBES):
                    yield self._read_probes(body)
                yield body
            if frames is not None:
                if self.complete and frames.offset < frames.size:
                    raise LedgerError(
                        f"{path} continues after byte {frames.offset}, and {self.path.name} ends "
                        "with a record that the run has ended. One of the two was edited or "
                        "replaced; take an unedited copy, or record the run again."
                    )
                yield from frames.read(frames.size, self._layouts, torn=True)
                self.truncated |= frames.truncated
        finally:
            if frames is not None:
                frames.close()

    def records(self) -> Iterator[Record | Frames]:
        """Yield each record after the header, and frames in order among them."""
        for entry in self.entries():
            if not isinstance(entry, bytes):
                yield entry
            elif not entry.startswith(_PROBES):
                yield self.parse(entry)

    def line_records(self) -> Iterator[Record]:
        """Yield each record after the header; of a ledger of schema 2, without frames."""
        return map(self.parse, cast("Iterator[bytes]", self.entries(lines_only=True)))

    def parse(self, body: bytes) -> Record:
        """Parse the record that ``bodies`` yielded last.

        Raises:
            LedgerError: With file, line and field, when the record breaks the schema.
        """
        try:
            record = decode_record(body)
        except FieldError as error:
            raise self._malformed(error) from error
        if isinstance(record, Header):
            raise self._malformed(FieldError("kind", "is 'header' a second time"))
        if isinstance(record, ProbeLayout):
            self._layouts.add(record)
        return record

    def close(self) -> None:
        """Close the file."""
        self._stream.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read_header(self) -> Header:
        line = self._stream.readline(MAX_HEADER + 1)
        if not line:
            raise LedgerError(
                f"{self.path} is empty: the run was ended before it wrote its first record. Record "
                "the run again."
            )
        if not line.startswith(_HEADER + b","):
            raise self._not_a_ledger(f"begins with {quote(line[:40].decode('latin-1'))}")
        if not line.endswith(b"\n"):
            if len(line) > MAX_HEADER:
                raise self._not_a_ledger(f"has a first line of more than {MAX_HEADER} bytes")
            raise LedgerError(
                f"{self.path} ends within its first record: the run was killed while it wrote it. "
                "Record the run again."
            )
        body = line[:-_TAIL] + b"}"
        try:
            header = decode_record(body)
        except FieldError as error:
            self._refuse_newer(body, error)
            raise self._not_a_ledger(f"has a first record whose {error}") from error
        assert isinstance(header, Header), "told by the first bytes"
        if header.schema > SCHEMA:
            raise self._newer(header.schema, header.package)
        self.line = 1
        expected, self._chain_hash = chain_record(body, CHAIN_START)
        if line != expected:
            raise self._broken(line)
        self._start = self._chain_hash
        return header

    def _frames_before(self, body: bytes, frames: FrameReader | None) -> Iterator[Frames]:
        """Yield the frames that precede a record ``frames``, and check that these are all."""
        end = self.parse(body)
        assert isinstance(end, FramesEnd), "told by the first bytes"
        if frames is None:
            raise LedgerError(
                f"{self.path}, line {self.line} refers to {end.bytes} bytes of digests of probes, "
                f"and {frames_path(self.path).name} is not beside it. Copy both files."
            )
        yield from frames.read(end.bytes, self._layouts)
        if frames.offset != end.bytes or frames.chain_hash != end.last:
            raise LedgerError(
                f"{frames.path} does not fit {self.path.name}, line {self.line}, which refers to "
                f"{end.bytes} bytes with the last check {end.last}: byte {frames.offset} follows "
                f"the check {frames.chain_hash}. It was cut or replaced; take an unedited copy, or "
                "record the run again."
            )

    def _read_probes(self, body: bytes) -> Frames:
        """Parse the probes of schema 1."""
        record = self.parse(body)
        assert isinstance(record, ProbesRecord), "told by the first bytes"
        try:
            check_frames(record, self._layouts.size(record.layout))
        except FieldError as error:
            raise self._malformed(error) from error
        place = record.epoch, record.step, record.batch, record.steps, record.batches
        return Frames(*place, record.count, self._layouts.get(record.layout), record.digests)

    def _refuse_newer(self, body: bytes, error: FieldError) -> None:
        """Raise if a header that cannot be parsed has a newer schema."""
        try:
            opaque = decode_record(body.replace(_HEADER, b'{"kind":"?"', 1)).as_record()
        except FieldError:
            return
        schema = opaque.get("schema")
        if type(schema) is int and schema > SCHEMA:
            raise self._newer(schema, opaque.get("package")) from error

    def _malformed(self, error: FieldError) -> LedgerError:
        return LedgerError(
            f"{self.path}, line {self.line}: {error}. The file was not written by lightning_d9m, "
            "or was edited; record the run again."
        )

    def _newer(self, schema: int, package: object) -> LedgerError:
        return LedgerError(
            f"{self.path} has schema {quote(schema)}; the lightning_d9m that is installed reads "
            f"schemas 1 to {SCHEMA}. It was written by lightning_d9m {quote(package)}: install "
            "that version or a later one."
        )

    def _not_a_ledger(self, reason: str) -> LedgerError:
        return LedgerError(
            f"{self.path} is not a ledger: it {reason}. A ledger is a folder fit-NNN with one file "
            "rank-N.jsonl for each rank; name such a folder or file."
        )

    def _broken(self, line: bytes) -> LedgerError:
        return LedgerError(
            f"{self.path}, line {self.line}{_describe_line(line)} does not fit its check: this "
            "record was edited, or a record before it was removed, added or moved. Nothing from "
            "here on can be trusted; take an unedited copy, or record the run again."
        )


def _describe_line(line: bytes) -> str:
    """Return the kind of record that an edited line claims to be; empty if it is unreadable."""
    try:
        record = decode_record(line[:-_TAIL] + b"}")
    except FieldError:
        return ""
    if isinstance(record, Digests):
        return f" (digests, {quote(record.moment)}, epoch {record.epoch}, step {record.step})"
    return f" ({quote(record.kind)})"
