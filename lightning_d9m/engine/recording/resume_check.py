"""The check of a resume: whether it continues the run that saved the checkpoint."""

from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import cast

from msgspec.structs import replace

from lightning_d9m.engine.hashing.training_state import Groups, Snapshot
from lightning_d9m.engine.ledger.folder import rank_path
from lightning_d9m.engine.ledger.format.reader import RankReader, find_parent
from lightning_d9m.engine.ledger.format.records import Digests, End, StepDigests
from lightning_d9m.engine.recording.expected_records import ExpectedRecords
from lightning_d9m.errors import LedgerError
from lightning_d9m.text import describe_names, pluralize

# No list of what a checkpoint must hold can be complete. This check needs none: a run that saves a
# checkpoint writes the digests of its state after the next steps to its ledger, and a run that
# resumes from the checkpoint compares its own, and all that the ledger has after that.

GENERATORS = "generators"
# Enough to name what differs: the totals, of 16 bytes, decide whether something does.
_ENTRY_BYTES = 4
_NAMES = 3


def digest_step(epoch: int, step: int, groups: Groups, committed: Mapping[str, str]) -> StepDigests:
    """Return the record of the state after a step, of digests by name and group, and totals."""
    return StepDigests(
        epoch=epoch,
        step=step,
        totals={**Snapshot(groups).total(), **committed},
        entries={
            group: b"".join(bytes.fromhex(text)[:_ENTRY_BYTES] for _, text in sorted(named.items()))
            for group, named in groups.items()
        },
    )


class ResumeCheck:
    """The records of a run after it had saved a checkpoint, of one rank, read in step with another.

    Args:
        own: The file of the resumed run's rank, or where it would be.
        parent: The ledger of the run that saved the checkpoint, as the checkpoint names it.
        mark: The chain hash of the last record before the checkpoint. It follows from all records
            before it, so it identifies the run, too.

    Attributes:
        problem: Why nothing can be compared; empty if something can.
    """

    def __init__(self, own: Path, parent: str, mark: str) -> None:
        self.problem = self._ended = ""
        self._reader: RankReader | None = None
        self._records: ExpectedRecords[StepDigests | Digests] = ExpectedRecords(())
        try:
            self._open(find_parent(own, parent), mark)
        except LedgerError as error:
            self.problem = f"its ledger cannot be read: {error}"
        if self.problem:
            self.close()

    def _open(self, path: Path | None, mark: str) -> None:
        if path is None:
            self.problem = "its ledger is not where the checkpoint says"
            return
        self._reader = reader = RankReader(path, mark=mark)
        records, first = self._read(reader), list[StepDigests | Digests]()
        # An epoch may be recorded right after the save.
        while (record := next(records, None)) is not None:
            first.append(record)
            if isinstance(record, StepDigests):
                break
        self._records = ExpectedRecords(chain(first, records))
        if not reader.marked:
            self.problem = f"{path} is not the ledger that the checkpoint names"
        elif record is None:
            # Early stopping may end a run after a callback has saved, and so may a callback that
            # saves because the machine is taken away: whether to train on is for the user to say.
            by = f", by {self._ended}" if self._ended else ""
            self.problem = f"it ended before the step after that{by}"

    def _read(self, reader: RankReader) -> Iterator[StepDigests | Digests]:
        for record in reader.read_lines():
            if isinstance(record, End):
                self._ended = record.reason or ""
            # What the run ended with, such as averaged weights, is not on the way.
            counts = isinstance(record, StepDigests) or getattr(record, "moment", "") == "epoch"
            if counts and 0 < reader.marked < reader.line:
                yield cast("StepDigests | Digests", record)

    @property
    def is_open(self) -> bool:
        """True while there may be records to compare."""
        return self._records.next is not None

    def compare(
        self, actual: StepDigests | Digests, groups: Mapping[str, Mapping[str, str]]
    ) -> str:
        """Return how a record, of these digests, differs from its counterpart.

        Empty if they agree, or if there is no counterpart.
        """
        try:
            expected = self._records.find(actual)
        except LedgerError as error:  # it was edited while this run trains
            self.close()
            return f"the ledger of the run that saved the checkpoint cannot be read: {error}"
        found: list[str] = []
        if isinstance(expected, StepDigests) and isinstance(actual, StepDigests):
            found = [
                _describe(group, expected.entries.get(group, b""), there, [*sorted(groups[group])])
                for group, there in actual.entries.items()
                if expected.totals.get(group) != actual.totals[group]
            ]
        # A run that `max_steps` ended within an epoch recorded it there, and nothing after it; the
        # resumed run trains the rest of the epoch.
        elif (
            isinstance(expected, Digests)
            and isinstance(actual, Digests)
            and (self.is_open or expected.step >= actual.step)
        ):
            # Its 480 lines are loaded by runs that compare.
            from lightning_d9m.engine.ledger.differences import find_difference

            # Logged numbers, such as measured times, may differ without an effect.
            pair = (replace(record, scalars={}) for record in (expected, actual))
            if (difference := find_difference(*pair)) is not None:
                found = [f"{kind} {n} of {of}" for kind, (n, of) in difference.by_kind.items()]
                found[0] += f" ({describe_names(difference.names, difference.count)})"
        if not found:
            return ""
        path = self._reader.path if self._reader else ""
        self.close()
        return (
            f"The resumed run differs from the run that saved the checkpoint in step {actual.step} "
            f"of epoch {actual.epoch}: {'; '.join(found)}. The checkpoint lacks state that the "
            "training uses, or you have changed the program, its data or its settings since, as a "
            f"learning rate. The ledger of that run: {path}."
        )

    def close(self) -> None:
        """Close the file; nothing is compared any more."""
        self._records = ExpectedRecords(())
        if self._reader is not None:
            self._reader.close()


def _describe(group: str, expected: bytes, actual: bytes, names: list[str]) -> str:
    """Return which entries of a group differ, if both runs have as many."""
    if len(expected) != len(actual):
        count = len(expected) // _ENTRY_BYTES
        return f"{group} ({pluralize(count, 'entry', 'entries')} there, {len(names)} here)"
    places = range(0, len(actual), _ENTRY_BYTES)
    differing = [
        name
        for name, at in zip(names, places, strict=True)
        if expected[at : at + _ENTRY_BYTES] != actual[at : at + _ENTRY_BYTES]
    ]
    listed = describe_names(differing[:_NAMES], len(differing), _NAMES)
    return f"{group} {len(differing)} of {len(names)} ({listed})"


def can_be_checked(position: Mapping[str, str] | None, rank: int) -> bool:
    """Return whether a run that resumes from a checkpoint can be compared with what followed it.

    ``position`` is the ``ledger`` that the checkpoint's state has of the rank.
    """
    if position is None or not position["folder"]:
        return False
    file = rank_path(Path(position["folder"]), rank)
    check = ResumeCheck(file, position["folder"], position["check"])
    check.close()
    return not check.problem
