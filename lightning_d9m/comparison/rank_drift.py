"""The first place at which the ranks of one run differ although they must be equal."""

from dataclasses import replace

from lightning_d9m.comparison.alignment import align_records
from lightning_d9m.comparison.differences import (
    Divergence,
    PlaceDifference,
    batch_difference,
    record_difference,
)
from lightning_d9m.ledger.folder import Ledger
from lightning_d9m.ledger.format.frames import Batch
from lightning_d9m.ledger.format.records import Digests, End, RankDrift
from lightning_d9m.ledger.stack import PIPELINE_STAGES, SHARDED_PARAMETERS

# Weights must be equal. An optimizer may shard the others: they count only after a batch in which
# all ranks agreed on them. If the header says that parameters are sharded, none of them counts.
_WEIGHT = "weight"
_MAYBE_SHARDED = frozenset({"optimizer", "gradient"})
_FLAT = "_flat_param"  # the name that FSDP1 gives them
# Kind of probe by the group of the entry that the run itself found to differ.
_KINDS = {"weights": "weight", "buffers": "buffer", "optimizers": "optimizer"}


def find_rank_drift(ledger: Ledger) -> tuple[Divergence, ...]:
    """Return where ranks first differ from the others, for each rank that differs there.

    The end of a run that a ``DriftError`` ended names the entry that differed. It counts from the
    start, beside those that must be equal in every run.

    ``expected`` of a ``Divergence`` is the value on the rank that the others are compared with:
    rank 0, or rank 1 if all ranks but rank 0 agree.

    Args:
        ledger: A run with several ranks. With probes of weights, buffers, gradients and the
            optimizer it shows the step; without, the epoch.

    Raises:
        LedgerError: If a record is malformed or was edited.
    """
    if PIPELINE_STAGES in ledger.header.stack:  # each rank trains another part of the model
        return ()
    first, *others = ledger.files
    known = _read_known_drift(ledger)
    found = [drift for rank in others if (drift := _compare_ranks(ledger, first, rank, known))]
    start = min((drift.when for drift in found), default=None)
    found = [drift for drift in found if drift.when == start]
    alike = {(drift.kind, drift.name, drift.actual) for drift in found}
    if 1 < len(found) == len(others) and len(alike) == 1:  # all agree but the first rank
        places = [
            place._replace(expected=place.actual, actual=place.expected)
            for place in found[0].places
        ]
        return (replace(found[0], rank=first, places=places),)
    return tuple(found)


def reference_rank(drift: Divergence) -> int:
    """Return the rank whose values ``drift`` has as expected."""
    return 1 if drift.rank == 0 else 0


def _read_known_drift(ledger: Ledger) -> RankDrift | None:
    """Return the difference that the run itself has found."""
    ends = (
        record
        for rank in ledger.files
        for record in ledger.line_records(rank)
        if type(record) is End
    )
    return next((end.drift for end in ends if end.drift is not None), None)


def _compare_ranks(
    ledger: Ledger, first: int, rank: int, known: RankDrift | None
) -> Divergence | None:
    sharded = bool(ledger.header.stack.get(SHARDED_PARAMETERS))
    comparable: set[str] = set() if sharded else {_WEIGHT}
    with ledger.open(first) as one_file, ledger.open(rank) as other_file:
        for one, other in align_records(one_file, other_file):
            found: Divergence | None = None
            places: list[PlaceDifference] = []
            if isinstance(one, Digests) and isinstance(other, Digests) and one is not other:
                found = record_difference(one, other)
                places = [
                    entry
                    for entry in (found.places if found else ())
                    if _must_be_equal(entry) or _is_known_entry(entry, other, known)
                ]
            elif isinstance(one, Batch) and isinstance(other, Batch):
                found = None if one is other else batch_difference(one, other)
                differing = found.places if found else ()
                places = [
                    place
                    for place in differing
                    if place.kind in comparable
                    or _is_known_place(place, None if sharded else known)
                ]
                if not sharded:
                    comparable |= _list_kinds(other) - {place.kind for place in differing}
            if places and found is not None:
                if isinstance(other, Digests):
                    size = len(other.groups.get(places[0].kind, ()))
                else:
                    size = found.compared
                compared = max(size, len(places))
                found = replace(found, places=places, count=len(places), compared=compared)
                return found.keep(rank)
    return None


def _must_be_equal(entry: PlaceDifference) -> bool:
    """Return whether an entry is a weight; the digest of a flat one of FSDP1 is a shard's."""
    return entry.kind == "weights" and not entry.name.endswith(_FLAT)


def _is_known_entry(entry: PlaceDifference, record: Digests, known: RankDrift | None) -> bool:
    """Return whether an entry of a record is the one that the run found there."""
    return (
        known is not None
        and (entry.kind, entry.name) == (known.group, known.name)
        and (record.moment, record.epoch, record.step) == (known.moment, known.epoch, known.step)
    )


def _is_known_place(place: PlaceDifference, known: RankDrift | None) -> bool:
    """Return whether a place holds the entry that the run found to differ."""
    if known is None or place.kind != _KINDS.get(known.group):
        return False
    return place.name == known.name or place.name.startswith(f"{known.name}:")


def _list_kinds(batch: Batch) -> set[str]:
    return {kind for kind, _, _ in batch.list_places()} & _MAYBE_SHARDED
