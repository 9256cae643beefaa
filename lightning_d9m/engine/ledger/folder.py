"""Ledgers: folders ``fit-NNN`` with one append-only file ``rank-N.jsonl`` for each rank.

Nothing here imports torch. docs/ledger.md describes the files for readers in other languages.
"""

import os
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from lightning_d9m.engine.ledger.format.reader import LineageReader, RankReader
from lightning_d9m.engine.ledger.format.records import (
    MAX_RANKS,
    Batch,
    Digests,
    End,
    Header,
    Record,
    StepDigests,
)
from lightning_d9m.engine.ledger.kinds import ENDS
from lightning_d9m.errors import LedgerError, file_errors
from lightning_d9m.text import escape

# The environment variable with the folder for the ledgers of a program.
LEDGER_VARIABLE = "LIGHTNING_D9M_LEDGER_DIR"
# One spelling of each number, so that two names cannot stand for one rank.
FOLDER = re.compile(r"(fit|final|predict|saved|test|validate)-([0-9]{3,9})")
_RANK = re.compile(r"rank-(0|[1-9][0-9]{0,8})\.jsonl")


def create_ledger_folder(parent: Path, kind: str = "fit") -> Path:
    """Make the next folder ``fit-000``, ``fit-001``, ... under ``parent`` and return it.

    An evaluation outside a fit has another ``kind``, such as ``test-000``, and is not listed among
    the fits. An existing folder is never reused, and creation is atomic: two processes get two
    folders.

    Raises:
        LedgerError: When no folder can be made there.
    """
    with file_errors(LedgerError, f"No ledger can be made in {parent}"):
        parent.mkdir(parents=True, exist_ok=True)
        taken = map(number_of, _find_folders(parent, kind))
        # Not the number of folders, because one that was deleted leaves a gap.
        number = max(taken, default=-1) + 1
        while True:
            folder = parent / f"{kind}-{number:03d}"
            try:
                folder.mkdir()
            except FileExistsError:
                number += 1
            else:
                return folder


def state_folder() -> Path:
    """Return a folder for the ledgers of this working folder among the user's files of state."""
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    cwd = Path.cwd()
    # Working folders of the same name must not share a folder.
    short = blake2b(str(cwd).encode(), digest_size=4).hexdigest()
    return Path(base, "lightning_d9m", f"{cwd.name}-{short}")


def rank_path(folder: Path, rank: int) -> Path:
    """Return the file of one rank."""
    return folder / f"rank-{rank}.jsonl"


def list_fits(parent: Path) -> list[Path]:
    """Return the ledger folders directly under ``parent``, oldest first."""
    # By number: as a name, `fit-1000` would come before `fit-999`.
    return sorted(_find_folders(parent, "fit"), key=number_of)


def list_evaluations(parent: Path) -> list[Path]:
    """Return the folders of evaluations directly under ``parent``, by their names."""
    return _find_folders(parent, "final", "predict", "saved", "test", "validate")


def number_of(folder: Path) -> int:
    """Return the number in the name of a ledger's folder."""
    return int(folder.absolute().name.rpartition("-")[2])


def _find_folders(parent: Path, *kinds: str) -> list[Path]:
    """Return the ledger folders of some kinds directly under ``parent``, by their names."""
    return [
        entry
        for entry in _scan(parent)
        if (match := FOLDER.fullmatch(entry.name)) and match[1] in kinds and entry.is_dir()
    ]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of one rank's part of a fit.

    Attributes:
        records: Number of records, the header included.
        last: The last digests, whatever their moment.
        final: The digests of the last state, if the fit got there: that with which it finished, or
            at which an exception ended it.
        end: The record that ends the file; None when the run was killed.
    """

    records: int
    last: Digests | None
    final: Digests | None
    end: End | None


@dataclass(frozen=True)
class Ledger:
    """A ledger whose headers were read; records are read on demand.

    Attributes:
        path: The fit folder, or the one file that was named.
        files: File by rank, in ascending order; ranks whose file is elsewhere are absent.
        headers: Header by rank.
    """

    path: Path
    files: Mapping[int, Path]
    headers: Mapping[int, Header]

    @property
    def header(self) -> Header:
        """The header of the lowest rank."""
        return next(iter(self.headers.values()))

    def open(self, rank: int) -> LineageReader:
        """Open one rank's file, with those of the runs that it continues, if it was resumed.

        Raises:
            LedgerError: When the ledger has no file of this rank.
        """
        if rank not in self.files:
            there = ", ".join(str(number) for number in list(self.files)[:8])
            raise LedgerError(f"{self.path} has no file of rank {rank}; it has rank {there}.")
        return LineageReader(self.files[rank])

    def records(self, rank: int) -> Iterator[Record | Batch]:
        """Yield the records of one rank after the header, and batches, as a stream."""
        with self.open(rank) as reader:
            yield from reader.records()

    def line_records(self, rank: int) -> Iterator[Record]:
        """Yield the records of one rank after the header, without those of single steps."""
        apart = Batch | StepDigests
        yield from (record for record in self.records(rank) if not isinstance(record, apart))

    def outcome(self, rank: int) -> Outcome:
        """Read one rank's file to its end and return how the fit ended."""
        last = final = end = None
        with self.open(rank) as reader:
            for record in reader.records():
                # An end that other records follow is that of a run which was continued.
                end = record if isinstance(record, End) else None
                if isinstance(record, Digests):
                    last = record
                    final = record if record.moment in ENDS else final
            return Outcome(reader.line, last, final, end)


def read_ledger(path: str | os.PathLike[str], *, ignoring: Path | None = None) -> Ledger:
    """Find a ledger and read its headers; the records are streamed later.

    Args:
        path: A folder ``fit-NNN``, a folder that holds exactly one such folder (directly or one
            level deeper), or one rank's file.
        ignoring: The ledger that this run is writing; it is not considered.

    Raises:
        LedgerError: When there is no ledger, more than one, or one that cannot be read.
    """
    place = Path(path)
    advice = "A ledger is a folder fit-NNN under the Trainer's log directory."
    with file_errors(LedgerError, f"The ledger {place} cannot be opened", advice):
        # Not `is_dir`, which says False for a path that does not exist; the error of `stat` says
        # why.
        is_folder = stat.S_ISDIR(place.stat().st_mode)
    if not is_folder:
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
    """Raise if a file does not belong to the other files of its folder."""
    header, first = headers[rank], next(iter(headers.values()))
    if header.rank != rank:
        raise LedgerError(
            f"{file} was written by rank {header.rank}, not by rank {rank}. It was renamed; give "
            "it back its name."
        )
    # Enough to tell runs apart that were copied into one folder; comparisons look at the rest.
    for name in ("world_size", "fit", "seed"):
        if getattr(header, name) != getattr(first, name):
            raise LedgerError(
                f"{file} belongs to another run than the file of rank {first.rank} beside it: "
                f"their {name} differs ({getattr(first, name)} and {getattr(header, name)}). Keep "
                "the files of each run in a folder of their own."
            )


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
        names = ", ".join(escape(str(fit)) for fit in fits[:4]) + (", ..." if fits[4:] else "")
        raise LedgerError(f"{folder} holds {len(fits)} ledgers: {names}. Name one of them.")
    if not fits or not _rank_files(fits[0]):
        raise LedgerError(
            f"{folder} holds no ledger: there is no file rank-N.jsonl in it, nor in a folder "
            "fit-NNN below it. Name the folder that a run with DeterminismCallback left."
        )
    return fits[0]


def _rank_files(folder: Path) -> dict[int, Path]:
    matches = ((entry, _RANK.fullmatch(entry.name)) for entry in _scan(folder))
    files = {int(match[1]): entry for entry, match in matches if match}
    if len(files) > MAX_RANKS:
        raise LedgerError(f"{folder} has {len(files)} ranks; a ledger has at most {MAX_RANKS}.")
    return dict(sorted(files.items()))


def _scan(folder: Path) -> list[Path]:
    with file_errors(LedgerError, f"{folder} cannot be read"):
        # The order of a file system depends on its history.
        return sorted(folder.iterdir())
