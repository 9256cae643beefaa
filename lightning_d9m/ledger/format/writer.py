"""The ledger's writer."""

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from lightning_d9m.errors import LedgerError
from lightning_d9m.file_errors import explain_file_error
from lightning_d9m.ledger.format.appended_file import AppendedFile, State
from lightning_d9m.ledger.format.encoding import encode_record
from lightning_d9m.ledger.format.fields import FieldError, Json
from lightning_d9m.ledger.format.hash_chain import CHAIN_START, chain_record
from lightning_d9m.ledger.format.probe_frames import (
    FIRST_FRAME,
    MAGIC,
    FramePosition,
    check_frames,
    encode_frames,
    frames_path,
)
from lightning_d9m.ledger.format.reader import MAX_HEADER, MAX_LINE
from lightning_d9m.ledger.format.records import FramesEnd, ProbesRecord, parse_record
from lightning_d9m.text import quote


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

    def write(self, record: Mapping[str, Json]) -> None:
        """Append one record.

        After a failure the writer refuses records: a ledger with a gap must not look complete.

        Raises:
            LedgerError: When the record is not one of the schema, or cannot be written; the ledger
                then ends with the record before it and stays readable.
        """
        self._check_open()
        kind = record.get("kind")
        try:
            if kind == "probes":
                self._write_frames(record)
            else:
                self._write_line(record)
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
        self._append_lines([])
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

    def _write_line(self, record: Mapping[str, Json]) -> None:
        body = encode_record(record)
        if record["kind"] == "frames":
            raise FieldError("kind", "is 'frames', a record that the writer adds itself")
        limit = MAX_LINE if self._lines.size else MAX_HEADER
        if record["kind"] == "layout":
            # Before it is written: an interruption may come between the two.
            self._layouts[record["id"]] = len(record["places"])
        self._append_lines([body], limit)

    def _append_lines(self, bodies: list[bytes], limit: int = MAX_LINE) -> None:
        if self._frames is not None:
            try:
                self._frames.resolve()
            except OSError as error:
                raise self._fail(self._frames, error) from error
        try:
            self._lines.resolve()
            check, referred = self._lines.state
            if self._frames is not None and self._frames.size != referred:
                referred = self._frames.size
                end = FramesEnd(referred, f"{self._frames.state[1]:016x}")
                bodies = [encode_record(end.as_record()), *bodies]
            data = b""
            for body in bodies:
                line, check = chain_record(body, check)
                _check_size(line, limit)
                data += line
            if not self._lines.size:
                self._start = check
            if data:
                self._lines.append(data, (check, referred))
        except OSError as error:
            raise self._fail(self._lines, error) from error

    def _write_frames(self, record: Mapping[str, Json]) -> None:
        frames = parse_record(dict(record))
        assert isinstance(frames, ProbesRecord), "the kind says so"
        check_frames(frames, self._layouts.get(frames.layout, 0))
        file = self._frames
        if file is None:
            state = (FIRST_FRAME, int(self._start, 16))
            file = self._frames = self._open(frames_path(self.path), state)
        try:
            if file.is_interrupted:
                file.resolve()
            data, position, check = encode_frames(frames, *file.state)
            file.append(data if file.size else MAGIC + data, (position, check))
        except OSError as error:
            raise self._fail(file, error) from error

    def _fail(self, file: AppendedFile[Any], error: OSError) -> LedgerError:
        self._failure = (
            f"The ledger {file.path} cannot be written: {explain_file_error(error)} Records of "
            f"this run are missing from here on; the first {file.size} bytes stay readable."
        )
        return LedgerError(self._failure)

    def _open(self, path: Path, state: State) -> AppendedFile[State]:
        try:
            return AppendedFile(path, state)
        except (OSError, ValueError) as error:
            raise LedgerError(
                f"The ledger {path} cannot be made: {explain_file_error(error)}"
            ) from error


def _check_size(line: bytes, limit: int) -> None:
    if len(line) > limit:
        raise OSError(f"a record of {len(line)} bytes exceeds the {limit} that are allowed")
