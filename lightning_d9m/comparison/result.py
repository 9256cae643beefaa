"""What the comparison of two ledgers says: rank by rank, and as a verdict."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lightning_d9m.comparison.probe_diff import PlaceDifference
from lightning_d9m.comparison.record_diff import FieldDifference, RecordDifference
from lightning_d9m.ledger.kinds import KINDS
from lightning_d9m.ledger.resumed_runs import Break

# What ranks compute on their own, from what the batch begins with up to the exchange of gradients.
_COMPUTED = KINDS[KINDS.index("input") : KINDS.index("gradient")]
# So many places of the batch that diverges first are listed; all are counted.
PLACES_KEPT = 10_000


@dataclass(frozen=True, slots=True)
class OneSided:
    """Records that only one of two runs has.

    Attributes:
        count: Their number.
        first: The first of them, in words; empty when there is none.
    """

    count: int
    first: str


NONE = OneSided(0, "")


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first place, in order of execution, at which one rank's runs disagree.

    Attributes:
        rank: The rank.
        moment: ``"batch"`` for a probe; else the moment of the digests that differ: ``"initial"``,
            ``"epoch"``, ``"final"``, or empty for another record.
        epoch: Counted from 0.
        step: The global step (when the batch began) in the later run.
        batch: Index of the batch within its epoch; None where no probe tells it.
        kind: Kind of the place (``"op"``, ``"gradient"``, ...), or the group of the digests
            (``"weights"``, ``"loss"``, ...).
        name: Name of the place.
        call: How often this kind and name occurred before within the batch.
        position: Number of the place in order of execution within its batch, in the earlier run;
            0 where no probe tells it.
        expected: Its digest in the earlier run.
        actual: Its digest in the later run.
        places: All places of that batch, or entries of that record, that differ, in order, this one
            first; at most ``PLACES_KEPT``.
        count: Their number, those that were not kept included.
        compared: Number of places of the batch, or entries of the record, that were compared.
        one_sided: Places of that batch that only one run has; at most ``PLACES_KEPT`` of each.
    """

    rank: int
    moment: str
    epoch: int
    step: int
    batch: int | None
    kind: str
    name: str
    call: int
    position: int
    expected: str
    actual: str
    places: tuple[PlaceDifference, ...]
    count: int
    compared: int
    one_sided: tuple[PlaceDifference, ...] = ()

    @property
    def when(self) -> tuple[int, ...]:
        """Where it stands in the order of execution, on whatever rank: the earliest is least.

        Of several in one batch, the earliest kind, and of what the batch computes, whatever kind
        it is, the earliest place: what one rank computes differently reaches the others with the
        gradients, or with what else the ranks exchange.
        """
        if self.moment == "" and self.kind == "end":  # how a run ended: after everything else
            return (2**63,)
        phase = {"initial": 0, "batch": 1, "epoch": 2, "final": 3}.get(self.moment, 1)
        when = (self.epoch, phase, self.step, self.batch or 0)
        if self.kind in _COMPUTED:
            return (*when, KINDS.index("input"), self.position)
        return (*when, KINDS.index(self.kind) if self.kind in KINDS else 0, 0)


@dataclass(frozen=True, slots=True)
class RankComparison:
    """How one rank's files compare.

    Attributes:
        rank: The rank.
        records: Number of pairs of records that were compared.
        digests: How many of these hold digests of the training's state.
        epochs: How many of these are the end of an epoch.
        differing: How many pairs differ.
        first: The first divergence; None when all pairs agree.
        only_expected: Records that only the earlier run has.
        only_actual: Records that only the later run has.
        expected_complete: Whether the earlier run wrote its last record; a killed one does not.
        actual_complete: Whether the later run did.
        expected_truncated: Whether the earlier run's last record is torn, and was left out.
        actual_truncated: Whether the later run's is.
        batches: Number of batches whose probes were compared.
        differing_batches: How many of them differ.
        places: Number of places (probes) that were compared.
        differing_places: How many of them differ.
        only_expected_places: Places, in batches of both, that only the earlier run has.
        only_actual_places: Places, in batches of both, that only the later run has.
        divergence: The first divergence as a place, with all that differ in its batch.
        expected_breaks: Where the earlier run was interrupted and resumed.
        actual_breaks: Where the later run was.
    """

    rank: int
    records: int
    digests: int
    epochs: int
    differing: int
    first: RecordDifference | None
    only_expected: OneSided
    only_actual: OneSided
    expected_complete: bool
    actual_complete: bool
    expected_truncated: bool
    actual_truncated: bool
    batches: int = 0
    differing_batches: int = 0
    places: int = 0
    differing_places: int = 0
    only_expected_places: OneSided = NONE
    only_actual_places: OneSided = NONE
    divergence: Divergence | None = None
    expected_breaks: tuple[Break, ...] = ()
    actual_breaks: tuple[Break, ...] = ()

    @property
    def equal(self) -> bool:
        """Whether both files hold the same evidence."""
        one_sided = (
            self.only_expected,
            self.only_actual,
            self.only_expected_places,
            self.only_actual_places,
        )
        differing = self.differing or self.differing_places
        return not differing and not any(found.count for found in one_sided)


@dataclass(frozen=True, slots=True)
class Comparison:
    """How two ledgers compare.

    Attributes:
        expected: The earlier run's ledger.
        actual: The later run's ledger.
        stack: Fields in which the stacks differ.
        settings: Settings that differ and leave the runs comparable.
        refusals: What makes the runs incomparable: another seed, model, dataset, world size, ...
        ranks: One entry for each rank that both ledgers have; empty when there are refusals that
            the headers show.
        ranks_only_expected: Ranks that only the earlier ledger has.
        ranks_only_actual: Ranks that only the later ledger has.
    """

    expected: Path
    actual: Path
    stack: tuple[FieldDifference, ...]
    settings: tuple[FieldDifference, ...]
    refusals: tuple[FieldDifference, ...]
    ranks: tuple[RankComparison, ...]
    ranks_only_expected: tuple[int, ...]
    ranks_only_actual: tuple[int, ...]

    @property
    def verdict(self) -> Literal["equal", "different", "not comparable"]:
        """``"equal"`` only when something was compared and no record differs or is missing."""
        if self.refusals or not self.ranks:
            return "not comparable"
        whole = not (self.ranks_only_expected or self.ranks_only_actual)
        if not whole or not all(rank.equal for rank in self.ranks):
            return "different"
        # Where nothing differs because no digest was there to compare, nothing is proven.
        proven = all(rank.digests or rank.places for rank in self.ranks)
        return "equal" if proven else "not comparable"

    @property
    def equal(self) -> bool:
        """Whether the runs are proven to agree bit for bit."""
        return self.verdict == "equal"

    @property
    def first(self) -> tuple[int, RecordDifference] | None:
        """The rank that diverges first, and how."""
        found = {rank.rank: rank.first for rank in self.ranks if rank.first is not None}
        return next(((d.rank, found[d.rank]) for d in self.divergences), None)

    @property
    def divergences(self) -> list[Divergence]:
        """The first divergence of each rank that has one, the earliest first."""
        found = [rank.divergence for rank in self.ranks if rank.divergence is not None]
        return sorted(found, key=lambda entry: entry.when)
