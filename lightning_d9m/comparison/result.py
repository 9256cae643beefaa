"""The result of the comparison of two ledgers: by rank, and as a verdict."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from lightning_d9m.comparison.probe_diff import PlaceDifference
from lightning_d9m.comparison.record_diff import FieldDifference, RecordDifference
from lightning_d9m.ledger.kinds import PROBE_KINDS
from lightning_d9m.ledger.resumed_runs import Break

# Groups of digests and kinds of probes and records that hold logged values, and evaluations.
LOGGED = frozenset({"scalar", "scalars"})
EVALUATED = LOGGED | {"evaluation"}
# The kinds that each rank computes alone: from the inputs up to the exchange of gradients.
_COMPUTED = PROBE_KINDS[PROBE_KINDS.index("input") : PROBE_KINDS.index("gradient")]
# Most places of the first divergent batch that are listed; all are counted.
PLACES_KEPT = 10_000


@dataclass(frozen=True, slots=True)
class OneSided:
    """Records that only one of two runs has.

    Attributes:
        count: Their number.
        first: Description of the first of them; empty if there is none.
    """

    count: int
    first: str


NONE = OneSided(0, "")


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first place, in order of execution, at which two runs of a rank differ.

    Attributes:
        rank: The rank.
        moment: ``"batch"`` for a probe; else the moment of the digests that differ: ``"initial"``,
            ``"epoch"``, ``"final"``, or empty for another record.
        epoch: Counted from 0.
        step: The global step (when the batch began) in the later run.
        batch: Index of the batch within its epoch; None without a probe.
        kind: Kind of the place (``"op"``, ``"gradient"``, ...), or the group of the digests
            (``"weights"``, ``"loss"``, ...).
        name: Name of the place.
        call: Number of earlier occurrences of this kind and name in the batch.
        position: Index of the place in order of execution within its batch, in the earlier run; 0
            without a probe.
        expected: Its digest in the earlier run.
        actual: Its digest in the later run.
        places: The places of that batch, or entries of that record, that differ, in order, this one
            first; at most ``PLACES_KEPT``.
        count: Number of all that differ.
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

    @classmethod
    def at_places(cls, places: Sequence[PlaceDifference], **facts: Any) -> "Divergence":
        """Return the divergence at the first of the places; the facts are its other attributes."""
        position, kind, name, call, *values = places[0]
        expected, actual = ("missing" if value is None else value for value in values)
        return cls(
            kind=kind,
            name=name,
            call=call,
            position=position,
            expected=expected,
            actual=actual,
            places=tuple(places[:PLACES_KEPT]),
            **facts,
        )

    @property
    def when(self) -> tuple[int, ...]:
        """Sort key in the order of execution, for divergences of all ranks.

        Within a batch the kind decides, and among the kinds that the batch computes the position:
        a value that one rank computes differently reaches the other ranks later, with the gradients
        or another exchange.
        """
        if self.moment == "" and self.kind == "end":  # the end of a run comes last
            return (2**63,)
        phase = {"initial": 0, "batch": 1, "epoch": 2, "final": 3}.get(self.moment, 1)
        when = (self.epoch, phase, self.step, self.batch or 0)
        if self.kind in _COMPUTED:
            return (*when, PROBE_KINDS.index("input"), self.position)
        return (*when, PROBE_KINDS.index(self.kind) if self.kind in PROBE_KINDS else 0, 0)


@dataclass(slots=True)
class RankComparison:
    """The comparison of one rank's files.

    Attributes:
        rank: The rank.
        records: Number of pairs of records that were compared.
        digests: Number of these that hold digests of the training's state.
        epochs: Number of these that are the end of an epoch.
        differing: Number of pairs that differ.
        first: The first divergence; None if all pairs agree.
        only_expected: Records that only the earlier run has.
        only_actual: Records that only the later run has.
        expected_complete: Whether the earlier run wrote its last record; a killed run does not.
        actual_complete: Whether the later run did.
        expected_truncated: Whether the earlier run's last record is torn and was skipped.
        actual_truncated: Whether the later run's is.
        batches: Number of batches whose probes were compared.
        differing_batches: Number of them that differ.
        uncompared_batches: Number of batches whose probes were not compared, because logical ranks
            ran on different numbers of processes.
        places: Number of places (probes) that were compared.
        differing_places: Number of them that differ.
        only_expected_places: Places, in batches of both, that only the earlier run has.
        only_actual_places: Places, in batches of both, that only the later run has.
        groups: The groups of digests, kinds of probes and of records in which something differs, as
            long as no state of the training does.
        divergence: The first divergence as a place, with all places that differ in its batch.
        expected_breaks: Where the earlier run was interrupted and resumed.
        actual_breaks: Where the later run was.
    """

    rank: int
    records: int = 0
    digests: int = 0
    epochs: int = 0
    differing: int = 0
    first: RecordDifference | None = None
    only_expected: OneSided = NONE
    only_actual: OneSided = NONE
    expected_complete: bool = False
    actual_complete: bool = False
    expected_truncated: bool = False
    actual_truncated: bool = False
    batches: int = 0
    differing_batches: int = 0
    uncompared_batches: int = 0
    places: int = 0
    differing_places: int = 0
    only_expected_places: OneSided = NONE
    only_actual_places: OneSided = NONE
    groups: tuple[str, ...] = ()
    divergence: Divergence | None = None
    expected_breaks: tuple[Break, ...] = ()
    actual_breaks: tuple[Break, ...] = ()

    @property
    def trained_alike(self) -> bool:
        """Whether nothing differs but logged values and evaluations."""
        return EVALUATED.issuperset(self.groups)

    @property
    def cut_off(self) -> bool:
        """Whether one file is the beginning of the other, because its run was ended early."""
        expected_longer = self.only_expected.count + self.only_expected_places.count
        actual_longer = self.only_actual.count + self.only_actual_places.count
        if self.differing or self.differing_places or (expected_longer and actual_longer):
            return False
        return not (self.actual_complete if expected_longer else self.expected_complete)

    @property
    def equal(self) -> bool:
        """Whether both files have the same contents."""
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
    """The comparison of two ledgers.

    Attributes:
        expected: The earlier run's ledger.
        actual: The later run's ledger.
        stack: Fields in which the stacks differ.
        settings: Settings that differ without making the runs incomparable.
        refusals: Fields that make the runs incomparable: seed, model, dataset, world size, ...
        ranks: One entry for each rank that both ledgers have; empty if the headers alone make the
            runs incomparable.
        ranks_only_expected: Ranks that only the earlier ledger has.
        ranks_only_actual: Ranks that only the later ledger has.
        initial_weights: Of runs on different numbers of processes, which are alike only before the
            first step: the names of the initial weights that differ; None if both do not have them.
        portable: Whether both runs computed portable bits, so that no stack explains a difference.
    """

    expected: Path
    actual: Path
    stack: tuple[FieldDifference, ...]
    settings: tuple[FieldDifference, ...]
    refusals: tuple[FieldDifference, ...]
    ranks: tuple[RankComparison, ...]
    ranks_only_expected: tuple[int, ...]
    ranks_only_actual: tuple[int, ...]
    initial_weights: tuple[str, ...] | None = None
    portable: bool = False

    def as_json(self) -> dict[str, object]:
        """Return the comparison as JSON types; the names are those of the attributes."""
        paths = {"expected": str(self.expected), "actual": str(self.actual)}
        return {"verdict": self.verdict, **asdict(self), **paths}

    @property
    def verdict(self) -> Literal["equal", "different", "incomplete", "not comparable"]:
        """``"equal"`` only if something was compared and no record differs or is missing.

        ``"incomplete"`` if one run was ended early and all that it recorded is equal.
        """
        if self.refusals or not self.ranks:
            return "not comparable"
        whole = not (self.ranks_only_expected or self.ranks_only_actual)
        if not whole or not all(rank.equal or rank.cut_off for rank in self.ranks):
            return "different"
        # Without digests to compare, nothing is proven.
        if not all(rank.digests or rank.places for rank in self.ranks):
            return "not comparable"
        return "equal" if all(rank.equal for rank in self.ranks) else "incomplete"

    @property
    def extent(self) -> Literal["logged values", "evaluations", "training"]:
        """The most that differs: the first two only if the runs have the same records."""
        alone = (self.ranks_only_expected, self.ranks_only_actual)
        sides = [(rank.only_expected, rank.only_actual) for rank in self.ranks]
        longer = any(one.count or other.count for one, other in sides)
        if any(alone) or longer or not all(rank.trained_alike for rank in self.ranks):
            return "training"
        logged = all(LOGGED.issuperset(rank.groups) for rank in self.ranks)
        return "logged values" if logged else "evaluations"

    @property
    def equal(self) -> bool:
        """Whether the runs are proven to be bit-exact."""
        return self.verdict == "equal"

    @property
    def first(self) -> tuple[int, RecordDifference] | None:
        """The rank that diverges first, and its first difference."""
        found = {rank.rank: rank.first for rank in self.ranks if rank.first is not None}
        return next(((d.rank, found[d.rank]) for d in self.divergences), None)

    @property
    def divergences(self) -> list[Divergence]:
        """The first divergence of each rank that has one, earliest first."""
        found = [rank.divergence for rank in self.ranks if rank.divergence is not None]
        return sorted(found, key=lambda entry: entry.when)

    def _repr_html_(self) -> str:
        """Return what a notebook shows."""
        from lightning_d9m.comparison.notebook import render_html

        ledgers = [("reference", self.expected), ("this run", self.actual)]
        fields = [
            (entry.field, *entry.shown) for entry in (*self.refusals, *self.stack, *self.settings)
        ]
        places = [
            (at.rank, at.epoch, at.step, at.batch, at.kind, at.name, f"{at.count} of {at.compared}")
            for at in self.divergences
        ]
        tables = (
            (("", "ledger"), ledgers),
            (("differs", "reference", "this run"), fields),
            (("rank", "epoch", "step", "batch", "kind", "first difference", "differing"), places),
        )
        return render_html(self.verdict, sum(rank.records for rank in self.ranks), tables)
