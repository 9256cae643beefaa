"""The ledger's writer: a file to which whole records are appended, whatever ends the process."""

import os
from contextlib import AbstractContextManager, suppress
from pathlib import Path

from lightning_d9m.engine.ledger.format.records import (
    CHAIN_START,
    MAX_HEADER,
    MAX_LINE,
    FieldError,
    ProbeLayout,
    ProbesRecord,
    Record,
    chain_record,
    encode_record,
)
from lightning_d9m.errors import LedgerError, explain_file_error, file_errors
from lightning_d9m.text import quote


class LedgerWriter(AbstractContextManager["LedgerWriter"]):
    """Appends records to one rank's file.

    ``write`` passes each record to the kernel in one system call: a process that is killed loses at
    most the record that it was writing. Nothing waits for the disk: a machine that loses power may
    lose the last seconds, as it may lose those of checkpoints.

    Args:
        path: The file, which must not exist.

    Raises:
        LedgerError: When the file exists or cannot be made.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._process = os.getpid()
        self._closed = False
        self._failure: str | None = None
        # Those that are not written yet: more than one if a signal handler writes during a write.
        self._waiting: list[Record] = []
        self._is_writing = False
        # Of all whole records, and of those with the one under way: their bytes, the last check,
        # and how many places each layout has.
        self._written: tuple[int, bytes, dict[int, int]] = (0, CHAIN_START, {})
        self._begun = self._written
        # O_EXCL: a run never continues a file. O_APPEND: the kernel writes at the end, even if
        # another program has changed the file. O_CLOEXEC: a program that this one starts, such as
        # a loader's worker, does not keep the file open.
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        with file_errors(LedgerError, f"The ledger {path} cannot be made"):
            self._file = os.open(path, flags, 0o666)

    @property
    def chain_hash(self) -> str:
        """The chain hash of the last record: 16 hex digits."""
        return self._written[1].decode()

    def write(self, record: Record) -> None:
        """Append one record.

        A signal handler may call this during a write, which then writes the handler's record, too.
        After a failure the writer refuses records: a ledger with a gap must not look complete.

        Raises:
            LedgerError: When the record is not one of the schema, or cannot be written; the ledger
                then ends with the record before it and stays readable.
        """
        if self._failure is not None:
            raise LedgerError(self._failure)
        if self._closed:
            raise LedgerError(f"The ledger {self.path} is closed; no record can be added.")
        # Two processes that append would break the chain, each for the other.
        if os.getpid() != self._process:
            raise LedgerError(
                f"The ledger {self.path} belongs to process {self._process}; this process "
                f"{os.getpid()} was forked from it and must not write there. Start a new Trainer "
                "run in the forked process."
            )
        self._waiting.append(record)
        while self._waiting and not self._is_writing:
            try:
                self._is_writing = True
                if self._waiting:  # a handler may have come between
                    self._write(self._waiting.pop(0))
            finally:
                self._is_writing = False

    def _write(self, record: Record) -> None:
        try:
            # The record before may have been interrupted (Ctrl-C within `os.write`), so it is
            # looked at only now. A handler cannot know how much the kernel had taken.
            self._resolve()
            layouts = self._written[2]
            if isinstance(record, ProbesRecord):
                record.check_places(layouts.get(record.layout, 0))
            if isinstance(record, ProbeLayout):
                layouts = {**layouts, record.id: len(record.places)}
            self._append(encode_record(record), layouts)
        except FieldError as error:
            raise LedgerError(
                f"A record {quote(record.kind)} for {self.path} is malformed: {error}."
            ) from error
        except OSError as error:
            with suppress(OSError):
                self._resolve()
            self._failure = (
                f"The ledger {self.path} cannot be written: {explain_file_error(error)} Records of "
                f"this run are missing from here on; the first {self._written[0]} bytes stay "
                "readable."
            )
            raise LedgerError(self._failure) from error

    def close(self) -> None:
        """Close the ledger; a second call does nothing.

        Raises:
            LedgerError: When the disk reports that it could not keep the data, as those of networks
                do only now.
        """
        if self._closed:
            return
        self._closed = True
        with file_errors(LedgerError, f"The ledger {self.path} was not kept"):
            os.close(self._file)

    def __exit__(self, *_: object) -> None:
        self.close()

    def _resolve(self) -> None:
        """Find out whether an append that was interrupted was completed; undo a part of it."""
        status = os.fstat(self._file)
        # On Linux a deleted file can still be written, and nobody would find the ledger.
        if status.st_nlink == 0:
            raise OSError("the file was deleted while the run wrote it")
        if status.st_size == self._begun[0]:
            self._written = self._begun
        elif self._written[0] < status.st_size < self._begun[0]:
            os.ftruncate(self._file, self._written[0])
        elif status.st_size != self._written[0]:
            raise OSError("another program has changed the file")

    def _append(self, body: bytes, layouts: dict[int, int]) -> None:
        """Append a record. After an error ``_resolve`` takes a part of it back."""
        size, check, _ = self._written
        line, check = chain_record(body, check)
        limit = MAX_LINE if size else MAX_HEADER
        if len(line) > limit:
            raise OSError(f"a record of {len(line)} bytes exceeds the {limit} allowed")
        self._begun = (size + len(line), check, layouts)
        written = os.write(self._file, line)
        while written < len(line):
            # After a short write on a full disk, the next write raises the error.
            written += os.write(self._file, line[written:])
        self._written = self._begun
