"""The ledger's writer."""

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path

from lightning_d9m.errors import LedgerError
from lightning_d9m.file_errors import explain
from lightning_d9m.ledger.encoding import encode_record
from lightning_d9m.ledger.hash_chain import CHAIN_START, chain_record
from lightning_d9m.ledger.reader import MAX_HEADER, MAX_LINE
from lightning_d9m.ledger.records import Json
from lightning_d9m.ledger.schema import FieldError
from lightning_d9m.text import quote


class LedgerWriter(AbstractContextManager["LedgerWriter"]):
    """Appends records to one rank's file.

    ``write`` passes each record to the kernel in one system call: a process that is killed loses at
    most the record that it was writing. Only ``close`` waits for the disk (``fsync``): a machine
    that loses power may lose the last seconds.

    Args:
        path: The file, which must not exist.

    Raises:
        LedgerError: When the file exists or cannot be made.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._process = os.getpid()
        self._size = 0
        self._chain_hash = CHAIN_START
        self._begun = (0, CHAIN_START)
        self._failure: str | None = None
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        try:
            self._file: int | None = os.open(path, flags, 0o666)
        except (OSError, ValueError) as error:
            raise LedgerError(f"The ledger {path} cannot be made: {explain(error)}") from error

    @property
    def chain_hash(self) -> str:
        """The chain hash of the last record: 16 hex digits."""
        return self._chain_hash.decode()

    def write(self, record: Mapping[str, Json]) -> None:
        """Append one record.

        After a failure the writer refuses records: a ledger with a gap must not look complete.

        Raises:
            LedgerError: When the record is not one of the schema, or cannot be written; the ledger
                then ends with the record before it and stays readable.
        """
        if self._failure is not None:
            raise LedgerError(self._failure)
        if self._file is None:
            raise LedgerError(f"The ledger {self.path} is closed; no record can be added.")
        if os.getpid() != self._process:
            raise LedgerError(
                f"The ledger {self.path} belongs to process {self._process}; this process "
                f"{os.getpid()} was forked from it and must not write there. Start a new Trainer "
                "run in the forked process."
            )
        try:
            body = encode_record(record)
        except FieldError as error:
            kind = quote(record.get("kind"))
            raise LedgerError(f"A record {kind} for {self.path} is malformed: {error}.") from error
        try:
            if self._begun[0] != self._size or record.get("kind") != "probes":
                self._resolve_last_write(self._file)
            line, chain_hash = chain_record(body, self._chain_hash)
            self._begun = (self._size + len(line), chain_hash)
            self._append(self._file, line)
            self._size, self._chain_hash = self._begun
        except OSError as error:
            self._failure = (
                f"The ledger {self.path} cannot be written: {explain(error)} Records of this run "
                f"are missing from here on; the first {self._size} bytes stay readable."
            )
            raise LedgerError(self._failure) from error

    def _append(self, file: int, line: bytes) -> None:
        """Write all of ``line``, or nothing of it."""
        limit = MAX_LINE if self._size else MAX_HEADER
        if len(line) > limit:
            raise OSError(f"a record of {len(line)} bytes exceeds the {limit} that are allowed")
        try:
            written = os.write(file, line)
            while written < len(line):
                # After a short write on a full disk, the next write raises the error.
                written += os.write(file, line[written:])
        except OSError:
            os.ftruncate(file, self._size)
            raise

    def _resolve_last_write(self, file: int) -> None:
        """Find out whether an interrupted write of the previous record was completed.

        Before a record of probes this is called only after an interruption, because it takes as
        long as writing the record.
        """
        status = os.fstat(file)
        if status.st_nlink == 0:
            raise OSError("the file was deleted while the run wrote it")
        if status.st_size == self._begun[0]:
            self._size, self._chain_hash = self._begun
        elif self._size < status.st_size < self._begun[0]:
            os.ftruncate(file, self._size)
        elif status.st_size != self._size:
            raise OSError("another program has changed the file")

    def close(self) -> None:
        """Write the ledger to the disk and close it; a second call does nothing.

        Raises:
            LedgerError: When the disk reports that it could not keep the data.
        """
        if self._file is None:
            return
        file, self._file = self._file, None
        try:
            try:
                os.fsync(file)
            finally:
                os.close(file)
        except OSError as error:
            raise LedgerError(f"The ledger {self.path} was not kept: {explain(error)}") from error

    def __exit__(self, *_: object) -> None:
        self.close()
