"""The ledger's writer: files to which whole records are appended, whatever ends the process."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Generic, TypeVar

from lightning_d9m.errors import LedgerError
from lightning_d9m.file_errors import explain_file_error
from lightning_d9m.ledger.format.frames import (
    FIRST_FRAME,
    MAGIC,
    FramePosition,
    check_frames,
    encode_frames,
    frames_path,
)
from lightning_d9m.ledger.format.records import (
    CHAIN_START,
    MAX_HEADER,
    MAX_LINE,
    FieldError,
    FramesEnd,
    Json,
    ProbeLayout,
    ProbesRecord,
    Record,
    chain_record,
    encode_record,
    parse_record,
)
from lightning_d9m.text import quote

State = TypeVar("State")


class AppendedFile(Generic[State]):
    """A new file to which whole pieces are appended, each in one system call.

    Args:
        path: The file, which must not exist.
        state: What follows from the pieces in the file, such as the hash that chains them.

    Attributes:
        size: Bytes of all pieces.
        state: The state after the last of them.

    Raises:
        OSError: When the file exists or cannot be made.
    """

    def __init__(self, path: Path, state: State) -> None:
        self.path = path
        self.size = 0
        self.state = state
        self._begun = (0, state)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        self._file = os.open(path, flags, 0o666)

    def resolve(self) -> None:
        """Find out whether an append that Ctrl-C interrupted was completed; undo a part of it."""
        status = os.fstat(self._file)
        if status.st_nlink == 0:
            raise OSError("the file was deleted while the run wrote it")
        if status.st_size == self._begun[0]:
            self.size, self.state = self._begun
        elif self.size < status.st_size < self._begun[0]:
            os.ftruncate(self._file, self.size)
        elif status.st_size != self.size:
            raise OSError("another program has changed the file")

    def append(self, make: Callable[[State], tuple[bytes, State]]) -> None:
        """Append all of the piece that follows the present state, or nothing of it.

        Raises:
            OSError: When it cannot be written, or another program changed or deleted the file.
        """
        self.resolve()
        piece, state = make(self.state)
        self._begun = (self.size + len(piece), state)
        try:
            written = os.write(self._file, piece)
            while written < len(piece):
                # After a short write on a full disk, the next write raises the error.
                written += os.write(self._file, piece[written:])
        except OSError:
            os.ftruncate(self._file, self.size)
            self._begun = (self.size, self.state)
            raise
        self.size, self.state = self._begun

    def close(self) -> None:
        """Write the file to the disk and close it.

        Raises:
            OSError: When the disk reports that it could not keep the data.
        """
        try:
            os.fsync(self._file)
        finally:
            os.close(self._file)


class LedgerWriter(AbstractContextManager["LedgerWriter"]):
    """Appends records to one rank's files.

    ``write`` passes each record to the kernel in one system call: a process that is killed loses at
    most the record that it was writing. Only ``close`` waits for the disk (``fsync``): a machine
    that loses power may lose the last seconds.

    Probes go into a file of frames beside the other records, which is made with the first of them.

    Args:
        path: The file of the records, which must not exist, nor the file of frames.

    Raises:
        LedgerError: When the file exists or cannot be made.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._process = os.getpid()
        self._closed = False
        self._failure: str | None = None
        # The check of the header, and the number of places of each layout.
        self._start = CHAIN_START
        self._layouts: dict[int, int] = {}
        # The last check, and the bytes of frames that a record has referred to.
        self._lines: AppendedFile[tuple[bytes, int]] = self._open(path, (CHAIN_START, 0))
        self._frames: AppendedFile[tuple[FramePosition, int]] | None = None

    @property
    def chain_hash(self) -> str:
        """The chain hash of the last record: 16 hex digits."""
        return self._lines.state[0].decode()

    def write(self, record: Record | Mapping[str, Json]) -> None:
        """Append one record, typed or as JSON values by name.

        After a failure the writer refuses records: a ledger with a gap must not look complete.

        Raises:
            LedgerError: When the record is not one of the schema, or cannot be written; the ledger
                then ends with the record before it and stays readable.
        """
        self._check_open()
        kind = record.get("kind") if isinstance(record, Mapping) else record.kind
        try:
            typed = parse_record(record) if isinstance(record, Mapping) else record
            if isinstance(typed, ProbesRecord):
                self._write_frames(typed)
            else:
                self._append(typed)
        except FieldError as error:
            raise LedgerError(
                f"A record {quote(kind)} for {self.path} is malformed: {error}."
            ) from error

    def refer_to_frames(self) -> str:
        """Refer to the frames that were written so far, and return the chain hash.

        Raises:
            LedgerError: When the record cannot be written.
        """
        self._check_open()
        self._append()
        return self.chain_hash

    def close(self) -> None:
        """Write the ledger to the disk and close it; a second call does nothing.

        Raises:
            LedgerError: When the disk reports that it could not keep the data.
        """
        if self._closed:
            return
        self._closed = True
        files: list[AppendedFile[Any]] = [self._lines]
        if self._frames is not None:
            files.insert(0, self._frames)
        for file in files:
            try:
                file.close()
            except OSError as error:
                raise LedgerError(
                    f"The ledger {file.path} was not kept: {explain_file_error(error)}"
                ) from error

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._failure is not None:
            raise LedgerError(self._failure)
        if self._closed:
            raise LedgerError(f"The ledger {self.path} is closed; no record can be added.")
        if os.getpid() != self._process:
            raise LedgerError(
                f"The ledger {self.path} belongs to process {self._process}; this process "
                f"{os.getpid()} was forked from it and must not write there. Start a new Trainer "
                "run in the forked process."
            )

    def _append(self, *records: Record) -> None:
        """Append records, after one that refers to the frames that were written before them."""
        bodies = [*map(encode_record, records)]
        for record in records:
            if isinstance(record, FramesEnd):
                raise FieldError("kind", "is 'frames', a record that the writer adds itself")
            if isinstance(record, ProbeLayout):
                # Before it is written: an interruption may come between the two.
                self._layouts[record.id] = len(record.places)
        if self._frames is not None:
            with self._appending(self._frames):
                self._frames.resolve()

        def make(state: tuple[bytes, int]) -> tuple[bytes, tuple[bytes, int]]:
            check, referred = state
            is_first = check == CHAIN_START
            frames, lines = self._frames, bodies
            if frames is not None and frames.size != referred:
                referred = frames.size
                end = FramesEnd(referred, f"{frames.state[1]:016x}")
                lines = [encode_record(end), *bodies]
            data = b""
            for body in lines:
                line, check = chain_record(body, check)
                limit = MAX_HEADER if is_first else MAX_LINE
                if len(line) > limit:
                    raise OSError(f"a record of {len(line)} bytes exceeds the {limit} allowed")
                data += line
            if is_first:
                self._start = check
            return data, (check, referred)

        with self._appending(self._lines):
            self._lines.append(make)

    def _write_frames(self, record: ProbesRecord) -> None:
        check_frames(record, self._layouts.get(record.layout, 0))
        if self._frames is None:
            state = (FIRST_FRAME, int(self._start, 16))
            self._frames = self._open(frames_path(self.path), state)

        def make(state: tuple[FramePosition, int]) -> tuple[bytes, tuple[FramePosition, int]]:
            data, *after = encode_frames(record, *state)
            magic = MAGIC if state[0] == FIRST_FRAME else b""
            return magic + data, (after[0], after[1])

        with self._appending(self._frames):
            self._frames.append(make)

    @contextmanager
    def _appending(self, file: AppendedFile[Any]) -> Iterator[None]:
        """Refuse further records if one cannot be appended."""
        try:
            yield
        except OSError as error:
            self._failure = (
                f"The ledger {file.path} cannot be written: {explain_file_error(error)} Records "
                f"of this run are missing from here on; the first {file.size} bytes stay readable."
            )
            raise LedgerError(self._failure) from error

    def _open(self, path: Path, state: State) -> AppendedFile[State]:
        try:
            return AppendedFile(path, state)
        except (OSError, ValueError) as error:
            raise LedgerError(
                f"The ledger {path} cannot be made: {explain_file_error(error)}"
            ) from error
