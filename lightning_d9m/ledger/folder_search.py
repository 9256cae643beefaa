"""The search for ledgers under a folder, in the order in which they were written."""

import os
from dataclasses import dataclass
from pathlib import Path

from lightning_d9m.errors import LedgerError
from lightning_d9m.ledger.folder import Ledger, list_evaluations, list_fits, read_ledger

_PAIR = 2


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
        LedgerError: If there is no such folder, or no ledger in it.
    """
    if not folder.is_dir():
        raise LedgerError(f"{folder} is not a folder, so no ledgers can be listed in it.")
    own = folder.absolute()
    paths = {*list_fits(own.parent), *list_evaluations(own.parent)} & {own}
    paths = {folder} if paths else set()
    for parent, names, _ in os.walk(folder):
        names[:] = [name for name in names if not name.startswith(".")]
        if any(name.rpartition("-")[2].isdigit() for name in names):
            paths |= {*list_fits(Path(parent)), *list_evaluations(Path(parent))}
    if not paths:
        raise LedgerError(
            f"There is no ledger under {folder}. Name the folder in which a run with "
            "DeterminismCallback or lightning_d9m.Recorder left one."
        )
    found = []
    for path in paths:
        try:
            found.append(FoundLedger(path, read_ledger(path)))
        except LedgerError as error:
            found.append(FoundLedger(path, None, str(error)))
    return sorted(found, key=lambda entry: (entry.created, str(entry.path)))


def find_last_pair(folder: Path) -> tuple[Path, Path]:
    """Return the ledger of the last fit under a folder, and before it the one that it repeats.

    Raises:
        LedgerError: If there are no two such ledgers.
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
