"""The readers of one rank's ledger: a stream of records whose hash chain is verified.

Each line is a record whose last field is ``"check"``, the chain hash: BLAKE2b with 8 bytes over the
chain hash of the previous line (16 zeros before the first) and the bytes of this line that precede
``,"check":``. The chain finds accidents and naive edits: a record that was changed, removed, added
or moved. It is not a signature: anyone can recompute it.
"""

import os
import stat
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO

from msgspec import MsgspecError, Struct
from msgspec.json import decode

from lightning_d9m.engine.ledger.format.records import (
    CHAIN_START,
    MAX_HEADER,
    MAX_LINE,
    SCHEMA,
    Batch,
    Checkpoint,
    Digests,
    End,
    FieldError,
    Header,
    ProbeKey,
    ProbeLayout,
    ProbesRecord,
    Record,
    Resume,
    RunFacts,
    Sources,
    chain_record,
    decode_record,
)
from lightning_d9m.engine.ledger.kinds import ENDS
from lightning_d9m.errors import LedgerError, file_errors
from lightning_d9m.text import quote
from lightning_d9m.version import __version__

# The first bytes tell a ledger from any other file before JSON of unknown size is parsed.
_HEADER = b'{"kind":"header",'
# Of one length, so that a line is verified and cut before any JSON of it is parsed.
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
        problem: Why the run that it continues is not read; empty if it is, or there is none. Only
            a ``LineageReader`` reads it.

    Raises:
        LedgerError: When the file cannot be read, is not a ledger, or has another schema; while
            reading, when a record was edited or breaks the schema.
    """

    def __init__(self, path: Path, *, mark: str = "") -> None:
        self.path = path
        self.line = self.marked = 0
        self.truncated = self.complete = False
        self.problem = ""
        self._mark = mark.encode()
        self._layouts: dict[int, tuple[ProbeKey, ...]] = {}
        self._chain_hash = CHAIN_START
        self._stream = _open_regular(path)
        try:
            self.header = self._read_header()
        except BaseException:
            self.close()
            raise

    def records(self) -> Iterator[Record | Batch]:
        """Yield each record after the header, with batches in place of records of probes.

        It leaves out checkpoints and sources, which no comparison reads.
        """
        for record in self.read_lines():
            if isinstance(record, ProbesRecord):
                places = self._layouts.get(record.layout, ())
                try:
                    record.check_places(len(places))
                except FieldError as error:
                    raise self._malformed(error) from error
                batch = (record.epoch, record.step, record.batch, (places,), record.digests)
                yield Batch(*batch, record.problem)
            elif not isinstance(record, Checkpoint | Sources):
                yield record

    def close(self) -> None:
        """Close the file."""
        self._stream.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def read_lines(self) -> Iterator[Record]:
        """Yield every record that was not read yet, verified and parsed.

        If the file has grown since, another call yields what follows.
        """
        record: Record | None = None
        # With a limit, because a line of a file of zeros or of another format may have any length.
        for line in iter(partial(self._stream.readline, MAX_LINE + 1), b""):
            if not line.endswith(b"\n"):
                if len(line) > MAX_LINE:
                    raise LedgerError(
                        f"{self.path}, line {self.line + 1} is longer than {MAX_LINE} bytes, the "
                        "most that a record may have. The file was not written by lightning_d9m, "
                        "or was edited."
                    )
                # A command may read while the run writes: the next call begins with this line.
                self.truncated = True
                self._stream.seek(-len(line), os.SEEK_CUR)
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
        self.complete = isinstance(record, End)

    def _verify(self, line: bytes) -> bytes:
        """Return the JSON text of a line whose chain hash is right."""
        self.line += 1
        body = line[:-_TAIL] + b"}"
        expected, chain_hash = chain_record(body, self._chain_hash)
        if line != expected:
            raise LedgerError(
                f"{self.path}, line {self.line} does not fit its check: this record was edited, or "
                "a record before it was removed, added or moved. Nothing from here on can be "
                "trusted; take an unedited copy, or record the run again."
            )
        self._chain_hash = chain_hash
        if chain_hash == self._mark:
            self.marked = self.line
        return body

    def _read_header(self) -> Header:
        line = self._stream.readline(MAX_HEADER + 1)
        if line and not line.startswith(_HEADER):
            raise self._not_a_ledger(f"begins with {quote(line[:40].decode('latin-1'))}")
        if len(line) > MAX_HEADER:
            raise self._not_a_ledger(f"has a first line of more than {MAX_HEADER} bytes")
        if not line.endswith(b"\n"):
            raise LedgerError(
                f"{self.path} ends within its first record: the run was killed while it wrote it. "
                "Record the run again."
            )
        # The schema is read before the record: this version need not know another field of the
        # header of another one, and should say which version is needed.
        body = line[:-_TAIL] + b"}"
        try:
            origin = decode(body, type=_Origin)
        except (MsgspecError, UnicodeDecodeError, RecursionError) as error:
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
        # Last, so that a file of another version is not called edited.
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
        # Before it is opened: opening a pipe that nobody writes to waits indefinitely.
        if stat.S_ISREG(path.stat().st_mode):
            # Records of many digests have megabytes, which the default would read 8 KiB at a time.
            return path.open("rb", buffering=2**20)
    raise LedgerError(
        f"{path} is not a ledger: it is not a regular file. Name a folder fit-NNN or a file "
        "rank-N.jsonl."
    )


class LineageReader(RankReader):
    """Streams the file of a run after those of the runs that it continues, if it was resumed.

    It yields each record once, as the uninterrupted run would have written it, and where the run
    was resumed, the record that says so. The header, ``complete`` and ``line`` are those of the
    last file.
    """

    # The second record of a resumed run's file names the folder that it continues.

    def __init__(self, path: Path) -> None:
        self._parts, problem = _follow(path)
        super().__init__(path)
        self.problem = problem

    def records(self) -> Iterator[Record | Batch]:
        """Yield each record after the header once, and batches in order among them."""
        parts: list[tuple[Path, Resume | None]] = [*self._parts, (self.path, None)]
        for number, (path, resume) in enumerate(parts):
            part = self if resume is None else RankReader(path, mark=resume.parent_check)
            with nullcontext(part) if part is self else part:
                for record in RankReader.records(part):
                    if resume is not None and not _counts(record, part, resume):
                        continue
                    if not (number and isinstance(record, RunFacts)):
                        yield record


def holds_record(path: Path, chain_hash: str) -> bool:
    """Return whether a rank's file or one that it continues has a record with this chain hash."""
    return any(_holds(part, chain_hash) for part in (path, *list_continued(path)))


def list_continued(path: Path) -> list[Path]:
    """Return the files that a rank's file continues, the oldest first."""
    return [part for part, _ in _follow(path)[0]]


def read_lineage(path: Path) -> Iterator[tuple[Path, Record]]:
    """Yield each record of a rank's file after all of those that it continues, with its file."""
    for part in (*list_continued(path), path):
        with RankReader(part) as reader:
            for record in reader.read_lines():
                yield part, record


def _holds(path: Path, chain_hash: str) -> bool:
    with RankReader(path, mark=chain_hash) as reader:
        return any(reader.marked for _ in reader.read_lines()) or bool(reader.marked)


def _follow(path: Path) -> tuple[list[tuple[Path, Resume]], str]:
    """Return the continued files with the records that continue them, oldest first.

    Also return why the file that the oldest one continues is not read; empty if it continues none.
    """
    parts: list[tuple[Path, Resume]] = []
    problem = ""
    # By inode, because one file has many paths, and a chain of edited records may be a circle.
    seen: set[tuple[int, int]] = set()
    while (record := read_resume(path)) is not None:
        found = find_parent(path, record.parent)
        seen.add(_file_id(path))
        try:
            if found is None:
                problem = "it is not there"
            elif _file_id(found) in seen:
                problem = "it continues itself"
            elif not _holds(found, record.parent_check):
                problem = "it does not hold the record at which the checkpoint was saved"
        except LedgerError as error:
            problem = str(error)
        if found is None or problem:
            break
        parts.append((found, record))
        path = found
    return parts[::-1], problem


def read_resume(path: Path) -> Resume | None:
    """Return the record with which a resumed run's file begins; None in another file."""
    with RankReader(path) as reader:
        record = next(reader.read_lines(), None)
        return record if isinstance(record, Resume) else None


def _file_id(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_dev, status.st_ino


def find_parent(path: Path, parent: str) -> Path | None:
    """Return the file that a rank's file continues: at the named path, or beside its folder."""
    folder = path.parent
    # With logical ranks, the continued run may have had fewer processes.
    names = dict.fromkeys((path.name, "rank-0.jsonl"))
    # The name is relative to the folder where that is possible, so that both can be moved together.
    # Where it is not, the folder of the same name beside this one is tried.
    beside = folder.parent / Path(parent).name
    # One whose own folder has the name of its parent's does not continue itself.
    places = (folder / parent, *([] if beside == folder else [beside]))
    for file in (place / name for place in places for name in names):
        with suppress(OSError, RuntimeError):  # a name that is too long, links in a circle
            if parent and file.is_file():
                return file.resolve()
    return None


def _counts(record: Record | Batch, reader: RankReader, resume: Resume) -> bool:
    """Return whether the run that continues a file does not repeat a record of it."""
    if isinstance(record, End) or getattr(record, "moment", "") in ENDS:
        return False  # the resumed run has not reached the end of a run
    # What stands before the mark was written when the checkpoint was saved. A layout counts after
    # it, too, because a record of probes that counts may refer to it.
    if not 0 < reader.marked < reader.line or isinstance(record, ProbeLayout):
        return True
    if isinstance(record, Digests) and record.moment != "epoch":
        return False
    # An epoch may be recorded after the checkpoint that its end has saved.
    return getattr(record, "epoch", resume.epoch) < resume.epoch
