"""The differences between the probes of one batch in two runs."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from lightning_d9m.ledger.format.frames import Batch, unpack_places
from lightning_d9m.ledger.format.records import ProbeKey

# Kind of the place that stands for the step.
OTHER = "other fields"


class PlaceDifference(NamedTuple):
    """A place whose digest differs, or that only one run has.

    Attributes:
        position: Index of the place in order of execution within its batch, in the earlier run; in
            the later run if only that one has the place.
        kind: Kind of the place: ``"output"``, ``"gradient"``, ...
        name: Its name.
        call: Number of earlier occurrences of this kind and name in the batch.
        expected: The digest in the earlier run; None if it does not have the place.
        actual: The digest in the later run; None if it does not have the place.
    """

    position: int
    kind: str
    name: str
    call: int
    expected: str | None
    actual: str | None


@dataclass(frozen=True, slots=True)
class BatchComparison:
    """The comparison of the probes of one batch.

    Attributes:
        epoch: Counted from 0.
        step: The global step when the batch began, in the later run.
        batch: Index within the epoch.
        places: Number of places in common.
        differing: The places that differ, in order of execution.
        only_expected: Places that only the earlier run has, in order.
        only_actual: Places that only the later run has, in order.
        common: Kind of each place in common.
    """

    epoch: int
    step: int
    batch: int
    places: int
    differing: list[PlaceDifference]
    only_expected: list[PlaceDifference]
    only_actual: list[PlaceDifference]
    common: Sequence[str]

    @property
    def by_kind(self) -> dict[str, tuple[int, int]]:
        """(places that differ, places in common) for each kind in which some differ."""
        found = Counter(entry.kind for entry in self.differing)
        sizes = Counter(self.common)
        return {kind: (count, max(count, sizes[kind])) for kind, count in found.items()}

    @property
    def count(self) -> int:
        """Number of places that differ."""
        return len(self.differing)


def compare_batches(expected: Batch, actual: Batch) -> BatchComparison:
    """Compare the probes of one batch with their counterparts, place by place."""
    match = _match_layouts(expected.layouts, actual.layouts)
    ours, theirs = expected.list_digests(), actual.list_digests()
    differing = []
    if expected.step != actual.step:
        steps = str(expected.step), str(actual.step)
        differing.append(PlaceDifference(expected.offset, OTHER, "global step", 0, *steps))
    differing += [
        PlaceDifference(expected.offset + n, *place, ours[n].hex(), theirs[m].hex())
        for place, n, m in match.common
        if ours[n] != theirs[m]
    ]
    return BatchComparison(
        epoch=expected.epoch,
        step=actual.step,
        batch=expected.batch,
        places=len(match.common) + (expected.step != actual.step),
        differing=differing,
        only_expected=[
            PlaceDifference(expected.offset + n, *place, ours[n].hex(), None)
            for n, place in match.only_expected
        ],
        only_actual=[
            PlaceDifference(actual.offset + n, *place, None, theirs[n].hex())
            for n, place in match.only_actual
        ],
        common=match.kinds,
    )


class _LayoutMatch(NamedTuple):
    """The places that are counterparts, with their index in each run; those of one run alone."""

    common: list[tuple[ProbeKey, int, int]]
    kinds: list[str]
    only_expected: list[tuple[int, ProbeKey]]
    only_actual: list[tuple[int, ProbeKey]]


# A training has few layouts.
@lru_cache(maxsize=4)
def _match_layouts(expected: tuple[bytes, ...], actual: tuple[bytes, ...]) -> _LayoutMatch:
    """Return which places of two batches are counterparts, given the layouts of their parts."""
    ours, theirs = _number_places(expected), _number_places(actual)
    return _LayoutMatch(
        [(key[0], n, theirs[key]) for key, n in ours.items() if key in theirs],
        [key[0][0] for key in ours if key in theirs],
        [(n, key[0]) for key, n in ours.items() if key not in theirs],
        [(n, key[0]) for key, n in theirs.items() if key not in ours],
    )


def _number_places(layouts: tuple[bytes, ...]) -> dict[tuple[ProbeKey, int], int]:
    """Return the index of each place by (place, how often the batch has it before)."""
    seen: Counter[ProbeKey] = Counter()
    numbers: dict[tuple[ProbeKey, int], int] = {}
    for token in layouts:
        for place in unpack_places(token):
            numbers[place, seen[place]] = len(numbers)
            seen[place] += 1
    return numbers
