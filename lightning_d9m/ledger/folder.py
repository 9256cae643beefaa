"""Ledgers: folders ``fit-NNN`` with one append-only file ``rank-N.jsonl`` for each rank.

Nothing here imports torch. The form of a record is in ``schema``, the chain of checks in
``rank_file``; docs/ledger.md describes both for readers in other languages.
"""

import os
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from lightning_d9m.errors import LedgerError
from lightning_d9m.ledger.encoding import encode_record
from lightning_d9m.ledger.reader import (
    CHAIN_START,
    MAX_HEADER,
    MAX_LINE,
    RankReader,
    explain,
    seal_record,
)
from lightning_d9m.ledger.records import Digests, End, Header, Json, Record
from lightning_d9m.ledger.resumed_runs import open_lineage
from lightning_d9m.ledger.schema import MAX_RANKS, FieldError
from lightning_d9m.text import plain, shown

_FIT = re.compile(r"fit-([0-9]{3,9})")
_EVALUATION = re.compile(r"(?:predict|test|validate)-[0-9]{3,9}")
_RANK = re.compile(r"rank-(0|[1-9][0-9]{0,8})\.jsonl")


def create_ledger_folder(parent: Path, kind: str = "fit") -> Path:
    """Make the next folder ``fit-000``, ``fit-001``, ... under ``parent`` and return it.

    An evaluation on its own is of another ``kind``: ``test-000``, say. It is no fit, and counts for
    nothing where one fit is looked for.

    An older folder is never taken: making the folder is one atomic step, so that two processes that
    ask at the same time get two folders.

    Raises:
        LedgerError: When no folder can be made there.
    """
    try:
        parent.mkdir(parents=True, exist_ok=True)
        names = [entry.name for entry in parent.iterdir()]
        numbered = re.compile(f"{kind}-([0-9]{{3,9}})")
        taken = [int(match[1]) for name in names if (match := numbered.fullmatch(name))]
        number = max(taken, default=-1) + 1
        while True:
            folder = parent / f"{kind}-{number:03d}"
            try:
                folder.mkdir()
            except FileExistsError:
                number += 1
            else:
                return folder
    except (OSError, ValueError) as error:
        raise LedgerError(f"No ledger can be made in {parent}: {explain(error)}") from error


def rank_path(folder: Path, rank: int) -> Path:
    """Return the file of one rank."""
    return folder / f"rank-{rank}.jsonl"


def list_fits(parent: Path) -> list[Path]:
    """Return the ledger folders directly under ``parent``, oldest first."""
    fits = []
    for entry in _scan(parent):
        match = _FIT.fullmatch(entry.name)
        if match and entry.is_dir():
            fits.append((int(match[1]), entry))
    return [path for _, path in sorted(fits)]


def list_evaluations(parent: Path) -> list[Path]:
    """Return the folders of evaluations directly under ``parent``, by their names."""
    return [
        entry for entry in _scan(parent) if _EVALUATION.fullmatch(entry.name) and entry.is_dir()
    ]


class LedgerWriter(AbstractContextManager["LedgerWriter"]):
    """Appends records to one rank's file.

    Each record is handed to the kernel in one write before ``write`` returns, so that a process
    that is killed at any moment loses at most the record it was writing. Only ``close`` waits for
    the disk (``fsync``): a machine that loses power may lose the last seconds.

    Args:
        path: The file, which must not exist.

    Raises:
        LedgerError: When the file exists or cannot be made.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._size = 0
        self._check = CHAIN_START
        self._begun = (0, CHAIN_START)
        self._failure: str | None = None
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        try:
            self._file: int | None = os.open(path, flags, 0o666)
        except (OSError, ValueError) as error:
            raise LedgerError(f"The ledger {path} cannot be made: {explain(error)}") from error

    @property
    def check(self) -> str:
        """The check of the last record: 16 hex digits."""
        return self._check.decode()

    def write(self, record: Mapping[str, Json]) -> None:
        """Append one record.

        After a failure the writer takes no more records: a ledger with a gap must not look whole.

        Raises:
            LedgerError: When the record is not one of the schema, or cannot be written; the ledger
                then ends with the record before it and stays readable.
        """
        if self._failure is not None:
            raise LedgerError(self._failure)
        if self._file is None:
            raise LedgerError(f"The ledger {self.path} is closed; no record can be added.")
        try:
            body = encode_record(record)
        except FieldError as error:
            kind = shown(record.get("kind"))
            raise LedgerError(f"A record {kind} for {self.path} is malformed: {error}.") from error
        try:
            if self._begun[0] != self._size or record.get("kind") != "probes":
                self._settle(self._file)
            line, check = seal_record(body, self._check)
            self._begun = (self._size + len(line), check)
            self._append(self._file, line)
            self._size, self._check = self._begun
        except OSError as error:
            self._failure = (
                f"The ledger {self.path} cannot be written: {explain(error)} Records of this run "
                f"are missing from here on; the first {self._size} bytes stay readable."
            )
            raise LedgerError(self._failure) from error

    def _append(self, file: int, line: bytes) -> None:
        """Write all of ``line`` or leave nothing of it."""
        limit = MAX_LINE if self._size else MAX_HEADER
        if len(line) > limit:
            raise OSError(f"a record of {len(line)} bytes exceeds the {limit} that are allowed")
        try:
            written = os.write(file, line)
            while written < len(line):
                # A short write is a disk that is almost full: the next one says what is wrong.
                written += os.write(file, line[written:])
        except OSError:
            os.ftruncate(file, self._size)
            raise

    def _settle(self, file: int) -> None:
        """Find out whether the record before was written, when Ctrl-C came at that moment.

        Before a record of probes only then: in every step, it would take as long as the writing.
        """
        status = os.fstat(file)
        if status.st_nlink == 0:
            raise OSError("the file was deleted while the run wrote it")
        if status.st_size == self._begun[0]:
            self._size, self._check = self._begun
        elif self._size < status.st_size < self._begun[0]:
            os.ftruncate(file, self._size)
        elif status.st_size != self._size:
            raise OSError("another program has changed the file")

    def close(self) -> None:
        """Wait until the disk has the ledger, and close it; a second call does nothing.

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


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one rank's part of a fit ended.

    Attributes:
        records: Number of records, the header included.
        last: The last digests, whatever their moment.
        final: The digests of moment ``"final"``, if the fit got there.
        end: The record that ends the file; None when the run was killed.
        truncated: Whether a torn record was dropped.
    """

    records: int
    last: Digests | None
    final: Digests | None
    end: End | None
    truncated: bool


@dataclass(frozen=True)
class Ledger:
    """A ledger that can be read; only the headers have been read so far.

    Attributes:
        path: The fit folder, or the one file that was named.
        files: File by rank, in ascending order; ranks whose file is elsewhere are not there.
        headers: Header by rank.
    """

    path: Path
    files: Mapping[int, Path]
    headers: Mapping[int, Header]

    @property
    def header(self) -> Header:
        """The header of the lowest rank."""
        return next(iter(self.headers.values()))

    def open(self, rank: int) -> RankReader:
        """Open one rank's file, with those of the runs that it continues, if it was resumed.

        Raises:
            LedgerError: When the ledger has no file of this rank.
        """
        if rank not in self.files:
            there = ", ".join(str(number) for number in list(self.files)[:8])
            raise LedgerError(f"{self.path} has no file of rank {rank}; it has rank {there}.")
        return open_lineage(self.files[rank])

    def records(self, rank: int) -> Iterator[Record]:
        """Yield the records of one rank after the header, as a stream."""
        with self.open(rank) as reader:
            yield from reader.records()

    def outcome(self, rank: int) -> Outcome:
        """Read one rank's file to its end and tell how the fit ended."""
        last = final = end = None
        with self.open(rank) as reader:
            for record in reader.records():
                end = record if isinstance(record, End) else None
                if isinstance(record, Digests):
                    last = record
                    final = record if record.moment == "final" else final
            return Outcome(reader.line, last, final, end, reader.truncated)


def read_ledger(path: str | os.PathLike[str], *, ignoring: Path | None = None) -> Ledger:
    """Find a ledger and read its headers; the records are streamed later.

    Args:
        path: A folder ``fit-NNN``, a folder that holds exactly one such folder (directly or one
            level deeper), or one rank's file.
        ignoring: A ledger that does not count, because this run is writing it.

    Raises:
        LedgerError: When there is no ledger, more than one, or one that cannot be read.
    """
    place = Path(path)
    if not _is_folder(place):
        with RankReader(place) as reader:
            header = reader.header
        return Ledger(place, {header.rank: place}, {header.rank: header})
    place = _find_fit(place, ignoring)
    files = _rank_files(place)
    headers: dict[int, Header] = {}
    for rank, file in files.items():
        with RankReader(file) as reader:
            headers[rank] = reader.header
        _check_header(file, rank, headers)
    return Ledger(place, files, headers)


def _check_header(file: Path, rank: int, headers: Mapping[int, Header]) -> None:
    """The files of one folder must belong together: a stray one would be held against nothing."""
    header, first = headers[rank], next(iter(headers.values()))
    if header.rank != rank:
        raise LedgerError(
            f"{file} was written by rank {header.rank}, not by rank {rank}. It was renamed; give "
            "it back its name."
        )
    for name in ("world_size", "fit", "seed"):
        if getattr(header, name) != getattr(first, name):
            raise LedgerError(
                f"{file} belongs to another run than the file of rank {first.rank} beside it: "
                f"their {name} differs ({getattr(first, name)} and {getattr(header, name)}). Keep "
                "the files of each run in a folder of their own."
            )


def _is_folder(path: Path) -> bool:
    try:
        return stat.S_ISDIR(path.stat().st_mode)
    except (OSError, ValueError) as error:
        raise LedgerError(f"There is no ledger at {path}: {explain(error)}") from error


def _find_fit(folder: Path, ignoring: Path | None) -> Path:
    """Return the one fit folder that ``folder`` is or holds."""
    if _rank_files(folder):
        return folder
    fits = list_fits(folder)
    if not fits:
        fits = [fit for entry in _scan(folder) if entry.is_dir() for fit in list_fits(entry)]
    if ignoring is not None:
        fits = [fit for fit in fits if fit.resolve() != ignoring.resolve()]
    if len(fits) > 1:
        names = ", ".join(plain(str(fit)) for fit in fits[:4]) + (", ..." if fits[4:] else "")
        raise LedgerError(f"{folder} holds {len(fits)} ledgers: {names}. Name one of them.")
    if not fits or not _rank_files(fits[0]):
        raise LedgerError(
            f"{folder} holds no ledger: there is no file rank-N.jsonl in it, nor in a folder "
            "fit-NNN below it. Name the folder that a run with DeterminismCallback left."
        )
    return fits[0]


def _rank_files(folder: Path) -> dict[int, Path]:
    files = {}
    for entry in _scan(folder):
        if match := _RANK.fullmatch(entry.name):
            files[int(match[1])] = entry
    if len(files) > MAX_RANKS:
        raise LedgerError(f"{folder} has {len(files)} ranks; a ledger has at most {MAX_RANKS}.")
    return dict(sorted(files.items()))


def _scan(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError as error:
        raise LedgerError(f"{folder} cannot be read: {explain(error)}") from error
