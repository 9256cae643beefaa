"""The ledgers under a folder, and the two of the last runs."""

import os
from dataclasses import dataclass
from pathlib import Path

from lightning_d9m.engine.ledger.folder import FOLDER, Ledger, number_of, read_ledger
from lightning_d9m.errors import LedgerError


@dataclass(frozen=True)
class FoundLedger:
    """A folder that holds a ledger, or should.

    Attributes:
        path: The folder.
        ledger: The ledger; None if it cannot be read.
        problem: Why it cannot be read; empty if it can.
    """

    path: Path
    ledger: Ledger | None
    problem: str = ""

    @property
    def kind(self) -> str:
        """``"fit"``, or the name of an evaluation, such as ``"test"``."""
        return self.path.absolute().name.rpartition("-")[0]

    @property
    def created(self) -> str:
        """The time at which it was begun; empty if it cannot be read."""
        return "" if self.ledger is None else self.ledger.header.created

    def precedes(self, other: "FoundLedger") -> bool:
        """Return whether the other may repeat this one: the same kind and ordinal of the fit."""
        if self.ledger is None or other.ledger is None:
            return False
        return (self.kind, self.ledger.header.fit) == (other.kind, other.ledger.header.fit)


def search_ledgers(folder: Path) -> list[FoundLedger]:
    """Return all ledgers under a folder, oldest first; hidden folders are left out.

    Raises:
        LedgerError: If the folder does not exist, or has no ledger.
    """
    if not folder.is_dir():
        raise LedgerError(
            f"{folder} is not a folder, so no ledgers can be listed in it. Name one with ledgers, "
            "such as d9m-runs."
        )
    paths = {folder} if FOLDER.fullmatch(folder.absolute().name) else set()
    for parent, names, _ in os.walk(folder):
        # In place, so that `os.walk` does not enter them: .venv and .git have many thousand files.
        names[:] = [name for name in names if not name.startswith(".")]
        paths |= {Path(parent, name) for name in names if FOLDER.fullmatch(name)}
    if not paths:
        raise LedgerError(
            f"{folder.absolute()} has no ledger. Name the folder in which a run with "
            "DeterminismCallback or lightning_d9m.Recorder left one."
        )
    # A link to a ledger is not another one; it counts if what it names is elsewhere.
    ordered = sorted(paths, key=lambda path: (not path.is_symlink(), path))
    named = {path.resolve(): path for path in ordered}
    latest: dict[tuple[Path, str], str] = {}
    found = {}
    for path in sorted(named.values(), key=lambda path: (number_of(path), path)):
        # One that cannot be read is a row of the list: it must not hide the others.
        try:
            entry = FoundLedger(path, read_ledger(path))
        except LedgerError as error:
            entry = FoundLedger(path, None, str(error))
        # Times in ISO 8601 sort as texts. In one folder numbers grow, even if the clock goes back.
        place = path.absolute().parent, entry.kind
        latest[place] = max(latest.get(place, ""), entry.created)
        found[latest[place], number_of(path), str(path)] = entry
    return [found[key] for key in sorted(found)]


def find_last_pair(folder: Path) -> tuple[Path, Path]:
    """Return the ledger of the last fit under a folder, and before it the one that it repeats.

    Raises:
        LedgerError: If the folder has no two such ledgers.
    """
    fits = [entry for entry in search_ledgers(folder) if entry.kind == "fit" and entry.ledger]
    earlier = [entry for entry in fits[:-1] if entry.precedes(fits[-1])]
    if not earlier:
        there = f"only {fits[-1].path}" if fits else "none"
        raise LedgerError(
            f"Two ledgers of fits under {folder} are needed, and there is {there}. Run the "
            "program again, or name two ledgers."
        )
    return earlier[-1].path, fits[-1].path
