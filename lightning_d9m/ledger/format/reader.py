"""The reader of one rank's ledger: a stream of records whose hash chain is verified.

Each line is a record whose last field is ``"check"``, the chain hash: BLAKE2b with 8 bytes over the
chain hash of the previous line (16 zeros before the first) and the bytes of this line that precede
``,"check":``. The chain finds accidents and naive edits: a record that was changed, removed, added
or moved. It is not a signature: anyone can recompute it.
"""

import os
import stat
from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import BinaryIO

from msgspec import MsgspecError, Struct
from msgspec.json import decode

from lightning_d9m.errors import LedgerError, file_errors
from lightning_d9m.ledger.format.records import (
    CHAIN_START,
    MAX_HEADER,
    MAX_LINE,
    SCHEMA,
    Batch,
    End,
    FieldError,
    Header,
    ProbeKey,
    ProbeLayout,
    ProbesRecord,
    Record,
    chain_record,
    decode_record,
)
from lightning_d9m.text import quote
from lightning_d9m.version import __version__

_HEADER = b'{"kind":"header",'
_TAIL = len(b',"check":"0123456789abcdef"}\n')


class _Origin(Struct):
    """The fields of a header that each version writes."""

    schema: int
    package: str


class RankReader(AbstractContextManager["RankReader"]):
    """Streams one rank's file once, verifying the chain; memory is bounded by the longest record.

    Args:
        path: The file of the records.
        mark: The chain hash of a record to look for.

    Attributes:
        path: The file of the records.
        header: Its first record.
        line: Number of the line that was read last, from 1.
        truncated: Whether the last line is torn, as a killed run leaves it. Set at the end of the
            file.
        complete: Whether the last record is an ``End``. Set at the end of the file.
        marked: Number of the line with the chain hash ``mark``; 0 until it was read.

    Raises:
        LedgerError: When the file cannot be read, is not a ledger, or has another schema; while
            reading, when a record was edited or breaks the schema.
    """

    def __init__(self, path: Path, *, mark: str = "") -> None:
        self.path = path
        self.line = self.marked = 0
        self.truncated = self.complete = self._has_ended = False
        self._mark = mark.encode()
        self._layouts: dict[int, tuple[ProbeKey, ...]] = {}
        self._chain_hash = CHAIN_START
        self._stream = _open_regular(path)
        try:
            self.header = self._read_header()
        except BaseException:
            self.close()
            raise

    @property
    def chain_hash(self) -> str:
        """The chain hash of the record that was read last: 16 hex digits."""
        return self._chain_hash.decode()

    @property
    def is_beyond_mark(self) -> bool:
        """True if what was yielded last follows the record with the chain hash ``mark``."""
        return bool(self.marked) and (self.line > self.marked or self._has_ended)

    def records(self, *, lines_only: bool = False) -> Iterator[Record | Batch]:
        """Yield each record after the header, with batches in place of records of probes.

        With ``lines_only`` it leaves them out.
        """
        for record in self._read_lines():
            if not isinstance(record, ProbesRecord):
                yield record
            elif not lines_only:
                places = self._layouts.get(record.layout, ())
                try:
                    record.check_places(len(places))
                except FieldError as error:
                    raise self._malformed(error) from error
                yield Batch(record.epoch, record.step, record.batch, (places,), record.digests)

    def line_records(self) -> Iterator[Record]:
        """Yield each record after the header, without probes."""
        return (own for own in self.records(lines_only=True) if not isinstance(own, Batch))

    def close(self) -> None:
        """Close the file."""
        self._stream.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read_lines(self) -> Iterator[Record]:
        """Yield each record after the header, verified and parsed."""
        record: Record | None = None
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
            body = self._verify(line)
            try:
                record = decode_record(body)
            except FieldError as error:
                raise self._malformed(error) from error
            if isinstance(record, Header):
                raise self._malformed(FieldError("kind", "is 'header' a second time"))
            if isinstance(record, ProbeLayout):
                self._layouts[record.id] = record.places
            yield record
        self.complete, self._has_ended = isinstance(record, End), True

    def _verify(self, line: bytes) -> bytes:
        """Return the JSON text of a line whose chain hash is right."""
        self.line += 1
        body = line[:-_TAIL] + b"}"
        expected, chain_hash = chain_record(body, self._chain_hash)
        if line != expected:
            try:
                claimed = f" ({decode_record(body).kind})"
            except FieldError:
                claimed = ""
            raise LedgerError(
                f"{self.path}, line {self.line}{claimed} does not fit its check: this "
                "record was edited, or a record before it was removed, added or moved. Nothing "
                "from here on can be trusted; take an unedited copy, or record the run again."
            )
        self._chain_hash = chain_hash
        if chain_hash == self._mark:
            self.marked = self.line
        return body

    def _read_header(self) -> Header:
        line = self._stream.readline(MAX_HEADER + 1)
        if not line:
            raise LedgerError(
                f"{self.path} is empty: the run was ended before it wrote its first record. Record "
                "the run again."
            )
        if not line.startswith(_HEADER):
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
            origin = decode(body, type=_Origin)
        except (MsgspecError, UnicodeDecodeError) as error:
            raise self._not_a_ledger(f"has a first record that is not a header: {error}") from error
        if origin.schema != SCHEMA:
            raise LedgerError(
                f"{self.path} has schema {origin.schema}; the lightning_d9m that is installed "
                f"reads schema {SCHEMA}. It was written by lightning_d9m {quote(origin.package)}: "
                "install that version, or record the run again."
            )
        try:
            header = decode_record(body)
        except FieldError as error:
            raise self._not_a_ledger(f"has a first record whose {error}") from error
        assert isinstance(header, Header), "told by the first bytes"
        self._verify(line)
        return header

    def _malformed(self, error: FieldError) -> LedgerError:
        return LedgerError(
            f"{self.path}, line {self.line}: {error}. The file was edited, or another version of "
            f"lightning_d9m wrote it: it names {quote(self.header.package)}, and this one is "
            f"{__version__}. Install the version that it names, or record the run again."
        )

    def _not_a_ledger(self, reason: str) -> LedgerError:
        return LedgerError(
            f"{self.path} is not a ledger: it {reason}. A ledger is a folder fit-NNN with one file "
            "rank-N.jsonl for each rank; name such a folder or file."
        )


def _open_regular(path: Path) -> BinaryIO:
    """Open a file for reading; refuse a pipe or a device, which might never end."""
    with file_errors(LedgerError, f"{path} cannot be read"):
        # Without O_NONBLOCK, opening a named pipe waits for its writer.
        number = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise LedgerError(
            f"{path} is not a ledger: it is not a regular file. Name a folder fit-NNN or a file "
            "rank-N.jsonl."
        )
    return os.fdopen(number, "rb", buffering=2**20)
