"""Two runs that are compared while they run, so that both end at their first difference.

Records are compared as their bytes. Only where these differ are they parsed: numbers that a program
logs, such as measured times, may differ without an effect on the training.
"""

from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import BinaryIO

from lightning_d9m.engine.ledger.differences import find_difference
from lightning_d9m.engine.ledger.format.records import (
    Batch,
    FieldError,
    Header,
    ProbeKey,
    ProbeLayout,
    ProbesRecord,
    Record,
    RunFacts,
    decode_record,
)
from lightning_d9m.engine.ledger.keys import Item
from lightning_d9m.tools.comparison.ledgers import EVALUATED

# Two runs need not save at the same steps, and end for their own reasons.
_LEFT_OUT = (b'{"kind":"step"', b'{"kind":"checkpoint"', b'{"kind":"resume"', b'{"kind":"end"')
_CHECK = b',"check":"'
# Where an exception ended a run, whose failure decides.
_EXCEPTION, _HEAD = b'"moment":"exception"', 100
# Records after which a difference of what a fit begins with counts: before, a file may be that of
# another process, which takes the same number in the other run.
_SETTLED = 20


class PairWatch(AbstractContextManager["PairWatch"]):
    """Compares the ledgers of two runs as far as both go.

    A program that fits in several processes at once may number its ledgers in any order: then
    nothing is compared before both have ended.

    Args:
        folders: The folder of each run.
    """

    def __init__(self, folders: tuple[Path, Path]) -> None:
        self._folders = folders
        self._files: dict[str, tuple[_RecordStream, _RecordStream]] = {}
        self._differs = False
        self._begun: dict[str, int] = {}  # how many records follow such a difference

    def differs(self) -> bool:
        """Read what both have written since the last call; return whether the runs differ."""
        for name in self._list_new():
            one, other = (folder / name for folder in self._folders)
            self._files[name] = _RecordStream(one), _RecordStream(other)
        first = {streams[0].fit for streams in self._files.values() if streams[0].rank == 0}
        if len(first) < len([own for own in self._files.values() if own[0].rank == 0]):
            return False
        self._differs = self._differs or any(map(self._compare, self._files))
        return self._differs

    def __exit__(self, *_: object) -> None:
        for streams in self._files.values():
            for stream in streams:
                stream.close()

    def _list_new(self) -> list[str]:
        """Return the files that both runs have by now, with a whole header in each."""
        one, other = (
            {str(path.relative_to(folder)) for path in folder.glob("fit-*/rank-*.jsonl")}
            for folder in self._folders
        )
        return [
            name
            for name in sorted(one & other - self._files.keys())
            if all(_has_line(folder / name) for folder in self._folders)
        ]

    def _compare(self, name: str) -> bool:
        one, other = self._files[name]
        while one.fill() and other.fill():
            if name in self._begun:
                self._begun[name] += 1
            if one.take() != other.take() and _differ(one.item, other.item):
                if name not in self._begun and not _begins(one.item):
                    return True
                self._begun.setdefault(name, 0)
            if self._begun.get(name, 0) >= _SETTLED:
                return True
        return False


class _RecordStream:
    """The records of a file that grows, one after the other.

    Attributes:
        fit: The ordinal of the fit.
        rank: The rank.
        item: The record that was taken last, parsed when it is read.
    """

    def __init__(self, path: Path) -> None:
        self._file: BinaryIO = path.open("rb")
        self._places: dict[int, tuple[ProbeKey, ...]] = {}
        self._next: bytes | None = None
        self._last = b""
        header = decode_record(_strip(self._file.readline()))
        assert isinstance(header, Header), "it is the first record"
        self.fit, self.rank = header.fit, header.rank

    def fill(self) -> bool:
        """Return whether a record is there that was not taken yet."""
        while self._next is None:
            place = self._file.tell()
            line = self._file.readline()
            if not line.endswith(b"\n"):
                self._file.seek(place)
                return False
            if not line.startswith(_LEFT_OUT) and _EXCEPTION not in line[:_HEAD]:
                self._next = _strip(line)
        return True

    def take(self) -> bytes:
        """Return the next record as JSON text."""
        assert self._next is not None, "fill() comes first"
        self._last, self._next = self._next, None
        if self._last.startswith(b'{"kind":"layout"'):
            layout = decode_record(self._last)
            assert isinstance(layout, ProbeLayout), "told by the first bytes"
            self._places[layout.id] = layout.places
        return self._last

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    @property
    def item(self) -> Item | None:
        record: Record = decode_record(self._last)
        if not isinstance(record, ProbesRecord):
            return record
        places = self._places.get(record.layout, ())
        return Batch(record.epoch, record.step, record.batch, (places,), record.digests)


def _differ(one: Item | None, other: Item | None) -> bool:
    """Return whether more than logged values and evaluations differ."""
    with suppress(FieldError):
        if one is None or other is None or type(one) is not type(other):
            return True
        found = find_difference(one, other)
        return found is not None and not EVALUATED.issuperset(found.by_kind)
    return True


def _begins(item: Item | None) -> bool:
    """Return whether a record tells what a fit begins with."""
    return isinstance(item, RunFacts) or getattr(item, "moment", "") == "initial"


def _strip(line: bytes) -> bytes:
    """Return the JSON text of a record without its chain hash, which follows from all before it."""
    return line[: line.rindex(_CHECK)] + b"}"


def _has_line(path: Path) -> bool:
    with suppress(OSError), path.open("rb") as file:
        return file.readline().endswith(b"\n")
    return False
