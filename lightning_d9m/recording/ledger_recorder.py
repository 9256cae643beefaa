"""The recorder of a run: writes its ledger, and compares it with a reference and across ranks.

Framework-free: ranks communicate through ``Ranks``, so tests need no processes.
"""

import os
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lightning_d9m.control.settings import validate_choice
from lightning_d9m.errors import D9mError, DriftError, LedgerError
from lightning_d9m.hashing.training_state import Groups
from lightning_d9m.ledger.folder import rank_path, read_ledger
from lightning_d9m.ledger.format.records import Digests, End, Header, Json, RunFacts
from lightning_d9m.ledger.format.writer import LedgerWriter
from lightning_d9m.ledger.stack import SHARDED_PARAMETERS, are_portable, check_stack
from lightning_d9m.recording.collective import Ranks
from lightning_d9m.recording.rank_agreement import RankAgreement, rank_error
from lightning_d9m.recording.reference import Reference
from lightning_d9m.recording.replicated_state import ReplicatedState


@dataclass(frozen=True)
class Policy:
    """The reference of a run, and the effect of differences.

    ``reference`` is the ledger of an earlier run; None for none.

    Raises:
        SettingError: If a value is not allowed.
    """

    reference: Path | None = None
    on_drift: Literal["raise", "warn"] = "raise"
    on_stack_difference: Literal["raise", "warn", "ignore"] = "raise"

    def __post_init__(self) -> None:
        validate_choice("on_drift", self.on_drift, ("raise", "warn"))
        allowed = ("raise", "warn", "ignore")
        validate_choice("on_stack_difference", self.on_stack_difference, allowed)

    def check_reference(self) -> None:
        """Raise a ``LedgerError`` if the reference cannot be read."""
        if self.reference is not None:
            read_ledger(self.reference)


class LedgerRecorder:
    """Writes one rank's part of a ledger and checks it as it is written.

    An error on one rank is raised on all ranks, so that none waits for another.

    The folder exists. ``replicated`` is the state that must be equal on all ranks; None
    compares nothing across ranks.
    """

    def __init__(
        self,
        folder: Path,
        header: Header,
        *,
        policy: Policy,
        ranks: Ranks | None = None,
        replicated: ReplicatedState | None = None,
    ) -> None:
        self.folder = folder
        self._header = header
        self._policy = policy
        self._ranks = ranks or Ranks(header.rank)
        self._gather = self._ranks.gather
        self._agreement = None
        if self._gather is not None and replicated is not None:
            self._agreement = RankAgreement(self._gather, replicated)
        self._writer: LedgerWriter | None = None
        self._problem: LedgerError | None = None
        self._reference: Reference | None = None

    @property
    def compares(self) -> bool:
        """Whether this run is compared with a reference or across ranks."""
        return self._reference is not None or self._agreement is not None

    @property
    def ledger_position(self) -> dict[str, str] | None:
        """The folder and the chain hash of the last record; None when the ledger is closed."""
        if self._writer is None:
            return None
        try:
            check = self._writer.refer_to_frames()
        except LedgerError as error:
            self._problem = self._problem or error
            check = self._writer.chain_hash
        return {"folder": str(self.folder.absolute()), "check": check}

    def begin(self, facts: RunFacts, resumed: Mapping[str, Json] | None = None) -> None:
        """Write the header and the facts of the run, and accept or refuse the reference.

        ``resumed`` is the record that names the continued ledger; None for none.

        Raises:
            LedgerError: When the ledger cannot be written or the reference not be read.
            StackDifferenceError: When the reference's stack differs, unless the policy allows it.
            ReferenceRefusedError: When the reference comes from another experiment.
        """
        self._ranks.raise_on_all(lambda: self._begin(facts, resumed))

    def record(self, digests: Digests) -> int:
        """Write the digests of a moment and compare them.

        Returns:
            The number of entries that differ from the reference or across ranks.

        Raises:
            DriftError: When entries differ and ``on_drift`` is ``"raise"``.
            LedgerError: When the ledger cannot be written.
        """
        found: list[DriftError] = []
        self._ranks.raise_on_all(lambda: found.extend(self._record(digests)))
        found += self._across_ranks(digests, found)
        if not found:
            return 0
        if self._policy.on_drift == "raise":
            raise found[0]
        for error in found:
            if self._header.rank in (0, error.rank):
                warnings.warn(str(error), stacklevel=2)
        return max(error.count for error in found)

    def keep_step(self, step: int, take: Callable[[], Groups]) -> None:
        """Keep the digests of a step, if they are wanted, until the ranks are compared.

        An error is left to the next record, which all ranks see.
        """
        agreement = self._agreement
        sharded = SHARDED_PARAMETERS in self._header.stack
        if agreement is not None and not sharded and agreement.wants_step(step):
            with suppress(D9mError):
                agreement.keep_step(step, take())

    def append(self, record: Mapping[str, Json]) -> None:
        """Write a record that is not compared during training, such as probes.

        An error is raised by the next call of ``record``, on all ranks.
        """
        if self._writer is None or self._problem is not None:
            return
        try:
            self._writer.write(record)
        except LedgerError as error:
            self._problem = error

    def end(self, end: End) -> None:
        """Write the last record, close the ledger, and warn of records that were not compared."""
        writer, self._writer = self._writer, None
        reference, self._reference = self._reference, None
        if writer is not None:
            # If the ledger could not be written, its error was raised and failed the run.
            with suppress(LedgerError) if end.status == "failed" else nullcontext(), writer:
                writer.write(end.as_record())
        if reference is None:
            return
        if end.status != "finished":
            reference.close()
            return
        unchecked = reference.finish()
        if unchecked is not None:
            warnings.warn(unchecked, stacklevel=2)

    def _begin(self, facts: RunFacts, resumed: Mapping[str, Json] | None) -> None:
        self._writer = LedgerWriter(rank_path(self.folder, self._header.rank))
        self._writer.write(self._header.as_record())
        if resumed is not None:
            self._writer.write(self._relative(resumed))
        self._writer.write(facts.as_record())
        if self._policy.reference is None:
            return
        reference = Reference(self._policy.reference, self._header.rank, writing=self.folder)
        self._reference = reference
        # The stack first: a different driver must not look like nondeterminism.
        expected, actual = reference.header.stack, self._header.stack
        policy = self._policy.on_stack_difference
        if are_portable(reference.header.settings, self._header.settings):
            policy = "ignore"
        warning = check_stack(expected, actual, policy)
        if warning is not None:
            warnings.warn(warning, stacklevel=2)
        reference.check_header(self._header)
        reference.check_run(facts)
        if resumed is not None:
            reference.skip_to(resumed["epoch"])

    def _relative(self, resumed: Mapping[str, Json]) -> Mapping[str, Json]:
        """Name the parent relative to this folder, so that both can be moved together."""
        parent = resumed.get("parent")
        with suppress(ValueError):  # on Windows, another drive
            if parent:
                return {**resumed, "parent": os.path.relpath(parent, self.folder)}
        return resumed

    def _record(self, digests: Digests) -> list[DriftError]:
        assert self._writer is not None, "begin() comes first"
        if self._problem is not None:
            raise self._problem
        self._writer.write(digests.as_record())
        difference = None if self._reference is None else self._reference.check(digests)
        if difference is None or self._reference is None:
            return []
        return [self._reference.drift_error(difference)]

    def _across_ranks(self, digests: Digests, found: list[DriftError]) -> list[DriftError]:
        """Return the errors that all ranks raise, the same on every rank."""
        if self._gather is None:
            return []
        agreement = self._agreement
        summary = [] if agreement is None else agreement.summarize(digests.groups)
        rows = self._gather([found[0].count if found else 0, *summary])
        counts = [row[0] for row in rows]
        drifted = [rank for rank, count in enumerate(counts) if count]
        errors: list[DriftError] = []
        if drifted and not found:
            errors.append(self._other_rank_error(digests, drifted[0], counts[drifted[0]]))
        if agreement is None:
            return errors
        differences = agreement.compare([row[1:] for row in rows])
        steps = agreement.find_steps() if differences else {}
        for group, difference in differences.items():
            errors.append(
                rank_error(
                    difference,
                    moment=digests.moment,
                    epoch=digests.epoch,
                    step=digests.step,
                    group=group,
                    steps=steps.get(group),
                )
            )
        return errors

    def _other_rank_error(self, digests: Digests, rank: int, count: int) -> DriftError:
        return DriftError(
            f"Rank {rank} differs from its reference (epoch {digests.epoch}, step {digests.step}); "
            f"this rank {self._header.rank} does not. What differs is in the message of rank "
            f"{rank} and in its ledger, {rank_path(self.folder, rank)}.",
            moment=digests.moment,
            epoch=digests.epoch,
            step=digests.step,
            rank=rank,
            group="",
            names=(),
            count=count,
            total=0,
            expected="",
            actual="",
        )
