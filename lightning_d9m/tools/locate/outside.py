"""The reads from outside that came before two runs differed, and the order of their samples."""

import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from linecache import getline
from pathlib import Path
from typing import Any

from lightning_d9m.engine.ledger.differences import Divergence
from lightning_d9m.engine.ledger.kinds import STATE, VALIDATION
from lightning_d9m.engine.probes.outside import PATTERN

# What can hardly be equal in two runs comes last: it explains a difference only if the program uses
# it, and most programs only measure times and name files by it.
UNLIKELY = ("process number", "thread", "process", "connection", "address", "clock")
# They are noted without a value, so two runs cannot be shown to have read the same.
_ALWAYS_DIFFER = frozenset({"thread", "process", "connection", "address"})
_SAYING = {
    "seed": "another seed is set",
    "entropy": "entropy is read",
    "temporary name": "a temporary name is made",
    "listing": "a folder is listed, in another order",
    "times": "a folder is listed whose files were written in another order",
    "file": "a file with another content is read",
    "unknown file": "a file is read whose content cannot be compared",
    "process number": "the number of the process is read",
    "thread": "a thread starts",
    "process": "a process starts",
    "connection": "a connection is made",
    "address": "the address of an object is read",
    "clock": "the clock is read",
}


@dataclass(frozen=True)
class OutsideRead:
    """A read from outside that may explain why two runs differ.

    Attributes:
        kind: The kind of read.
        file: The program's file.
        line: The line in it.
        code: The text of that line.
        what: What was read.
        through: The libraries that read it for the program; empty if the program did.
    """

    kind: str
    file: str
    line: int
    code: str
    what: str
    through: str

    def __str__(self) -> str:
        through = f", through {self.through}" if self.through else ""
        return f"{_SAYING.get(self.kind, self.kind)} ({self.what}){through}"

    @property
    def location(self) -> str:
        """``file:line``, relative to the working folder if it is inside."""
        with suppress(ValueError):
            return f"{Path(self.file).relative_to(Path.cwd())}:{self.line}"
        return f"{self.file}:{self.line}"


Lines = list[dict[str, Any]]


def read_lines(folder: Path) -> dict[str, Lines]:
    """Return the lines that each process of a run wrote; incomplete ones are left out."""
    found: dict[str, Lines] = {}
    for path in sorted(folder.glob(PATTERN)):
        lines = found.setdefault(path.stem, [])
        for text in path.read_text("utf-8", "replace").splitlines():
            with suppress(ValueError):  # of a process that was killed
                lines.append(json.loads(text))
    return found


def find_reads(folders: Sequence[Path], ledger: str, first: Divergence | None) -> list[OutsideRead]:
    """Return the reads that came before two runs differed, the likeliest first.

    Left out are those whose value was the same in both runs.

    Args:
        folders: The folders of the two runs.
        ledger: The name of the first run's ledger that differs.
        first: Where it differs; None if that is not known.
    """
    runs = [read_lines(folder) for folder in folders]
    values = [_list_values(run) for run in runs]
    found: dict[tuple[str, int], tuple[tuple[Any, ...], list[Any]]] = {}
    for run, others in zip(runs, reversed(values), strict=True):
        end, training = _find_end(run, ledger, first)
        for line in chain(*run.values()):
            read = line.get("read")
            if not read or line["time"] > end or not _differs(read, others):
                continue
            kind, _, _, file, number, through = read
            # What a library reads within the call that trains is mostly for itself.
            within = bool(through) and [file, number] == training
            order = (within, _rank_kind(kind, through), end - line["time"])
            if (file, number) not in found or order < found[file, number][0]:
                found[file, number] = (order, read)
    ordered = sorted(found.values(), key=lambda entry: entry[0])
    return [
        OutsideRead(
            "unknown file" if (kind, value) == ("file", None) else kind,
            *(file, number, getline(file, number).strip(), what, through),
        )
        for _, (kind, what, value, file, number, through) in ordered
    ]


def _rank_kind(kind: str, through: str) -> int:
    """Return how unlikely a read is to explain a difference, from 0."""
    # A library that another one calls reads files, such as settings, for itself. One that the
    # program calls reads those of the program: `pandas.read_csv`.
    if kind == "file" and ", " in through:
        return len(UNLIKELY) + 1
    return UNLIKELY.index(kind) + 1 if kind in UNLIKELY else 0


_Values = dict[tuple[Any, ...], set[Any]]


def _list_values(run: dict[str, Lines]) -> _Values:
    """Return the values that a run read, by kind, line and name, and without the name."""
    values: _Values = defaultdict(set)
    for line in chain(*run.values()):
        if read := line.get("read"):
            kind, what, value, *place = read
            for key in ((kind, what, *place), (kind, *place)):
                values[key].add(value)
    return values


def _differs(read: Sequence[Any], others: _Values) -> bool:
    """Return whether the other run read no such value."""
    kind, what, value, *place = read
    if kind in _ALWAYS_DIFFER:
        return True
    other = others.get((kind, *place))
    if kind in ("file", "times") and other is not None:  # those of one name are comparable
        other = others.get((kind, what, *place), {value})
        return value is None or value not in other
    return other is None or value not in other


def _find_end(
    run: dict[str, Lines], ledger: str, first: Divergence | None
) -> tuple[float, list[Any] | None]:
    """Return the time until which reads may explain a divergence, and the line that trains."""
    latest = max((line["time"] for line in chain(*run.values())), default=0)
    for lines in run.values():
        training: list[Any] | None = None
        found = False
        for line in lines:
            if begun := line.get("ledger"):
                rank = 0 if first is None else first.rank
                training = begun[2:] if begun[:2] == [ledger, rank] else None
            elif (mark := line.get("mark")) and training is not None and first is not None:
                if found:
                    return line["time"], training
                found = mark[:3] == [first.moment, first.epoch, first.step] and (
                    first.moment != "batch" or mark[3] == first.batch
                )
                # State was read when the batch began; other values were read within it.
                if found and (first.moment != "batch" or (first.kind in STATE and not first.call)):
                    return line["time"], training
        if training is not None:
            return latest, training
    return latest, None


def list_generators(folder: Path, ledger: str, rank: int) -> list[str]:
    """Return the paths of the generators that a run found in the data of a fit."""
    for line in chain(*read_lines(folder).values()):
        if (begun := line.get("ledger")) and begun[:2] == [ledger, rank]:
            return sorted({str(path) for path in line.get("generators", ())})
    return []


def describe_samples(folders: Sequence[Path], ledger: str, first: Divergence) -> str:
    """Return a sentence if an epoch has the same samples in both runs, in another order."""
    samples, batches = zip(
        *(_list_samples(read_lines(folder), ledger, first) for folder in folders), strict=True
    )
    for what, (ours, theirs) in (("batches", batches), ("samples", samples)):
        if ours != theirs and Counter(ours) == Counter(theirs):
            return (
                f"the same {len(ours):,} {what} in another order, in epoch {first.epoch} as far as "
                "its batches were recorded"
            )
    return ""


def _list_samples(
    run: dict[str, Lines], ledger: str, first: Divergence
) -> tuple[list[str], list[str]]:
    """Return the samples and the batches of an epoch, in order."""
    samples: list[str] = []
    batches: list[str] = []
    for lines in run.values():
        within = counts = False
        for line in lines:
            if begun := line.get("ledger"):
                within = begun[:2] == [ledger, first.rank]
            elif mark := line.get("mark"):
                counts = within and mark[1] == first.epoch and mark[3] < VALIDATION
            elif counts and (rows := line.get("samples")):
                samples += rows
                batches.append(" ".join(rows))
    return samples, batches
