"""The reference of a run: an earlier ledger with which it is compared while it trains."""

import os
from collections.abc import Iterator
from itertools import dropwhile
from pathlib import Path

from lightning_d9m.engine.ledger.differences import (
    Divergence,
    FieldDifference,
    describe_varying,
    find_difference,
    header_differences,
    list_varying_ops,
    run_refusals,
)
from lightning_d9m.engine.ledger.folder import read_ledger
from lightning_d9m.engine.ledger.format.reader import RankReader
from lightning_d9m.engine.ledger.format.records import Digests, Header, RunFacts
from lightning_d9m.engine.ledger.keys import describe_record
from lightning_d9m.engine.ledger.kinds import ENDS, EXCEPTION
from lightning_d9m.engine.ledger.stack import same_logical_ranks
from lightning_d9m.engine.recording.expected_records import ExpectedRecords
from lightning_d9m.errors import DriftError, LedgerError, ReferenceRefusedError
from lightning_d9m.text import describe_names, describe_pair, escape, pluralize


class Reference:
    """One rank's part of a reference ledger, read in step with the run.

    Call ``accept`` once, then ``check`` for each record of digests in the order in which the run
    takes them, and ``finish`` at the end.

    The reference may end before the run or after it: records that only one of them has are not
    compared, and ``finish`` reports them. Records that only the reference has in between are
    skipped. A record that only the run has in between is an error.

    ``writing`` is the folder that this run writes, which is not its own reference.

    Attributes:
        header: The reference's header.
        checked: Number of records that were compared.
        beyond: Number of this run's records without a counterpart in the reference.

    Raises:
        LedgerError: If ``path`` has no ledger, or the ledger cannot be read.
    """

    def __init__(
        self, path: str | os.PathLike[str], rank: int, *, writing: Path | None = None
    ) -> None:
        self.rank = rank
        self.checked = 0
        self.beyond = 0
        self._ledger = read_ledger(path, ignoring=writing)
        self.header = self._ledger.headers.get(rank, self._ledger.header)
        self._reader: RankReader | None = None
        self._records: ExpectedRecords[Digests] = ExpectedRecords(())
        self._first_beyond: Digests | None = None
        self._varying_ops: tuple[str, ...] = ()
        self._agreed: str | None = None

    def accept(self, header: Header, facts: RunFacts, resumed: int | None = None) -> None:
        """Open the records, unless the reference comes from another experiment.

        ``resumed`` is the epoch in which this run was resumed, whose earlier records are skipped.

        Raises:
            ReferenceRefusedError: With the first field that differs.
            LedgerError: When the reference has no file of this rank, or no facts of its run.
        """
        self._refuse(header_differences(self.header, header)[0])
        self._varying_ops = list_varying_ops(self.header, header)
        # The header first, since it names causes: a different seed explains all that follows.
        # With logical ranks, a reference of fewer processes has no file of this rank.
        rank = self.rank if self.rank in self._ledger.files else self.header.rank
        alike = same_logical_ranks(self.header.stack, header.stack)
        self._reader = reader = self._ledger.open(rank if alike else self.rank)
        records = reader.records()
        first = next((record for record in records if isinstance(record, RunFacts)), None)
        if first is None:
            raise LedgerError(
                f"The reference {reader.path} ends before its training began, so there is "
                "nothing to compare this run with. Name the ledger of a run that trained."
            )
        self._refuse(run_refusals(first, facts))
        states: Iterator[Digests] = (record for record in records if isinstance(record, Digests))
        if resumed is not None:
            # Not `filter`: once the epoch has come, a record that is out of order must be seen.
            states = dropwhile(
                lambda record: record.moment == "initial" or record.epoch < resumed, states
            )
        self._records = ExpectedRecords(states)

    def check(self, actual: Digests) -> Divergence | None:
        """Compare one record of this run with its counterpart.

        Returns:
            The difference; None when they agree, or when the reference has ended.

        Raises:
            ReferenceRefusedError: When the reference continues without this record.
            LedgerError: When the reference was edited or is malformed.
        """
        expected = self._records.find(actual)
        if expected is not None:
            self.checked += 1
            difference = find_difference(expected, actual)
            if difference is None:
                self._agreed = describe_record(actual)
            return difference
        # A reference may have trained for fewer epochs, or a run ends before it: then there is
        # nothing to compare. One that has later records and not this one was recorded otherwise.
        following = self._records.next
        if not (following is None or _may_end(following, actual)):
            lacking, then = describe_record(actual), describe_record(following)
            raise ReferenceRefusedError(
                f"The reference {self._ledger.path} has no record of {lacking}; the next that "
                f"it has is {then}.\n  reference: {then}\n  this run:  {lacking}\n"
                "It was recorded at other moments than this run; record a new reference with "
                "the settings of this run.",
                field="records",
                expected=then,
                actual=lacking,
            )
        self.beyond += 1
        self._first_beyond = self._first_beyond or actual
        return None

    def drift_error(self, difference: Divergence) -> DriftError:
        """Build the error that names the record and entries that differ from the reference."""
        # The headline names one kind, and counts the entries of all.
        count = difference.by_kind.get(difference.kind, (difference.count, 0))[0]
        whole = difference.names == ("(total)",)
        named = "the digest of the group" if whole else describe_names(difference.names, count)
        headline = (
            f"This run differs from its reference in {difference.where} on rank {self.rank}: "
            f"{difference.count} of {difference.compared} entries differ, first in "
            f"{escape(difference.kind)}: {named}."
        )
        expected, actual = describe_pair(difference.expected, difference.actual)
        lines = [headline, f"  reference: {expected}", f"  this run:  {actual}"]
        lines += difference.describe_kinds()
        if difference.moment == "initial":
            lines.append(
                "They differed before the first step, so no training caused it. Seed before the "
                "model is built: call lightning_d9m.enable(seed=...) or seed_everything(...) at "
                "the top of the program; or the weights were loaded from another checkpoint."
            )
        elif set(difference.by_kind) == {"scalars"}:
            lines.append(
                "Nothing but logged scalars differs. A scalar that differs by nature, such as a "
                'measured time, can be left out: DeterminismCallback(ignored_metrics=["..."]).'
            )
        elif self._agreed is None:
            lines.append("No earlier record was compared, so the cause may lie anywhere before.")
        else:
            lines.append(f"They last agreed in {self._agreed}, so the cause lies after it.")
        lines.append(f"Reference: {self._reader.path if self._reader else self._ledger.path}")
        return DriftError("\n".join(lines), **difference.facts, rank=self.rank)

    def finish(self) -> str | None:
        """Return sentences about records that were not compared, and ops that may vary, if any."""
        left = self._records.count_left()
        self.close()
        parts = []
        if self.beyond and self._first_beyond is not None:
            records = pluralize(self.beyond, "record")
            parts.append(
                f"{records} of this run, from {describe_record(self._first_beyond)} on, had no "
                "counterpart there and went unchecked"
            )
        if left:
            parts.append(f"{pluralize(left, 'record')} there had no counterpart in this run")
        if self._reader is not None and not self._reader.complete:
            parts.append("that run was itself ended before it could finish its ledger")
        varying = describe_varying(self._varying_ops)
        if not parts and not varying:
            return None
        checked = f"Compared with {self._ledger.path}: {pluralize(self.checked, 'record')}"
        return f"{'; '.join([checked, *parts])}. {varying}".rstrip()

    def close(self) -> None:
        """Close the reference's file."""
        if self._reader is not None:
            self._reader.close()

    def _refuse(self, refusals: list[FieldDifference]) -> None:
        if not refusals:
            return
        first = refusals[0]
        expected, actual = map(escape, first.shown)
        others = f" Also different: {', '.join(escape(r.field) for r in refusals[1:])}."
        raise ReferenceRefusedError(
            f"The reference {self._ledger.path} comes from another experiment: its "
            f"{escape(first.field)} differs.\n  reference: {expected}\n  this run:  {actual}\n"
            f"{first.reason}{others if refusals[1:] else ''} Run as the reference was run, or name "
            "a reference that was run as this is.",
            field=first.field,
            expected=first.expected,
            actual=first.actual,
        )


def _may_end(expected: Digests, actual: Digests) -> bool:
    """Return whether one of two runs may have ended where each has another record."""
    ends_before = expected.moment == "final" and expected.epoch < actual.epoch
    return actual.moment in ENDS or expected.moment == EXCEPTION or ends_before
