"""The records of a ledger that a run should repeat, read in step with the run."""

from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

from lightning_d9m.engine.ledger.format.records import Digests, StepDigests
from lightning_d9m.engine.ledger.keys import LEDGER_START, record_key, record_place

StateRecord = TypeVar("StateRecord", Digests, StepDigests | Digests)


class ExpectedRecords(Generic[StateRecord]):
    """Finds the counterpart of each record of a run, in one pass.

    Args:
        records: The records, in their order.

    Attributes:
        next: The record that was not reached yet; None at the end.
        left: Number of records so far that the run did not have.
    """

    def __init__(self, records: Iterable[StateRecord]) -> None:
        self._records: Iterator[StateRecord] = iter(records)
        self.next: StateRecord | None = None
        self.left = 0
        self._advance()

    def find(self, actual: Digests | StepDigests) -> StateRecord | None:
        """Return the counterpart of a record of the run; None without one.

        Records that come before it in the order of a training are left out.
        """
        # One pass is enough because both ledgers are in the order of a training. A record that is
        # later than the run's is not passed over: it may be the counterpart of a later one.
        place = record_place(actual, LEDGER_START)
        while (expected := self.next) is not None:
            if record_key(expected) == record_key(actual):
                self._advance()
                return expected
            if record_place(expected, LEDGER_START) >= place:
                break
            self.left += 1
            self._advance()
        return None

    def count_left(self) -> int:
        """Return the number of records that the run did not have, at its end."""
        while self.next is not None:
            self.left += 1
            self._advance()
        return self.left

    def _advance(self) -> None:
        self.next = next(self._records, None)
