"""The reader of a resumed run: its ledger and those that it continues, as one stream.

The second record of a resumed run's ledger names the folder that it continues. The reader follows
these records back and yields each record once, as the uninterrupted run would have written it.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

from lightning_d9m.errors import LedgerError
from lightning_d9m.ledger.format.reader import RankReader
from lightning_d9m.ledger.format.records import (
    Batch,
    Digests,
    End,
    ProbeLayout,
    Record,
    Resume,
    RunFacts,
)

_Entry: TypeAlias = Record | Batch

_FIRST_RANK = "rank-0.jsonl"


@dataclass(frozen=True, slots=True)
class Break:
    """An interruption after which the run was resumed.

    Attributes:
        epoch: The epoch that was next or under way.
        step: The global step.
        batch: How many batches of the epoch were trained.
        parent: The ledger that is continued, as the record names it.
        problem: Why that ledger is not read; None when it is.
        inexact: Why the resumed run cannot end at the bits of an uninterrupted one; empty when it
            can.
    """

    epoch: int
    step: int
    batch: int
    parent: str
    problem: str | None = None
    inexact: tuple[str, ...] = ()


class LineageReader(RankReader):
    """Streams the file of a resumed run after those of the runs that it continues.

    The header, ``complete`` and ``line`` are those of the last file.

    Attributes:
        breaks: The interruptions, in order; reasons that a run found late are known once it was
            read.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        try:
            self._parts, self.breaks = _follow(path)
        except BaseException:
            self.close()
            raise

    def records(self, *, lines_only: bool = False) -> Iterator[Record | Batch]:
        """Yield each record after the header once, and batches in order among them."""
        for number, (path, resume) in enumerate(self._parts):
            with RankReader(path, mark=resume.parent_check) as part:
                records = part.records(lines_only=lines_only)
                inner = (own for own in records if _counts(own, part, resume))
                yield from self._select(number, inner)
        yield from self._select(len(self._parts), super().records(lines_only=lines_only))

    def _select(self, number: int, records: Iterator[_Entry]) -> Iterator[_Entry]:
        """Leave out what the part with this number repeats; keep the reasons that it gives."""
        for record in records:
            if isinstance(record, Resume):
                # The oldest part continues a ledger, too, if that cannot be read.
                place = number + len(self.breaks) - len(self._parts) - 1
                if place >= 0:
                    known = self.breaks[place]
                    reasons = tuple(dict.fromkeys((*known.inexact, *record.inexact)))
                    self.breaks[place] = replace(known, inexact=reasons)
            elif not (isinstance(record, RunFacts) and number):
                yield record


def open_lineage(path: Path) -> RankReader:
    """Open one rank's file and the files that it continues.

    Raises:
        LedgerError: When it cannot be read.
    """
    return RankReader(path) if _read_resume(path) is None else LineageReader(path)


def holds_record(path: Path, chain_hash: str) -> bool:
    """Return whether a rank's file or one that it continues has a record with this chain hash."""
    return any(_holds(part, chain_hash) for part in (path, *(part for part, _ in _follow(path)[0])))


def _holds(path: Path, chain_hash: str) -> bool:
    with RankReader(path, mark=chain_hash) as reader:
        return any(reader.marked for _ in reader.line_records()) or bool(reader.marked)


def _follow(path: Path) -> tuple[list[tuple[Path, Resume]], list[Break]]:
    """Return the continued files with the records that continue them, oldest first; the breaks."""
    parts: list[tuple[Path, Resume]] = []
    breaks: list[Break] = []
    seen: set[tuple[int, int]] = set()
    while (record := _read_resume(path)) is not None:
        found = _find_parent(path, record.parent)
        seen.add(_file_id(path))
        problem = None
        try:
            if found is None:
                problem = "it is not there"
            elif _file_id(found) in seen:
                problem = "it continues itself"
            elif not _holds(found, record.parent_check):
                problem = "it does not hold the record at which the checkpoint was saved"
        except LedgerError as error:
            problem = str(error)
        place = record.epoch, record.step, record.batch
        breaks.append(Break(*place, record.parent, problem, record.inexact))
        if found is None or problem is not None:
            break
        parts.append((found, record))
        path = found
    return parts[::-1], breaks[::-1]


def _read_resume(path: Path) -> Resume | None:
    with RankReader(path) as reader:
        record = next(reader.line_records(), None)
        return record if isinstance(record, Resume) else None


def _file_id(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_dev, status.st_ino


def _find_parent(path: Path, parent: str) -> Path | None:
    """Return the continued file: at the named path, or beside this folder."""
    folder = path.parent
    # With logical ranks, the continued run may have had fewer processes.
    names = dict.fromkeys((path.name, _FIRST_RANK))
    places = (folder / parent, folder.parent / Path(parent).name)
    for file in (place / name for place in places for name in names):
        with suppress(OSError, RuntimeError):  # a name that is too long, links in a circle
            if parent and file.is_file():
                return file.resolve()
    return None


def _counts(record: _Entry, reader: RankReader, resume: Resume) -> bool:
    """Return whether the run that continues a file does not repeat a record of it."""
    if isinstance(record, End) or getattr(record, "moment", "") == "final":
        return False  # the resumed run has not reached the end of a run
    if not reader.is_beyond_mark or isinstance(record, ProbeLayout):
        return True
    if isinstance(record, Digests) and record.moment != "epoch":
        return False
    return getattr(record, "epoch", resume.epoch) < resume.epoch
