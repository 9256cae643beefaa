"""The differences between the probes of one batch in two runs."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import ne
from typing import NamedTuple

from lightning_d9m.ledger.format.fields import ProbeKey
from lightning_d9m.ledger.format.probe_layouts import unpack_places
from lightning_d9m.ledger.probe_batch import Batch

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
        count: Number of them that differ.
        differing: The places that differ, in order of execution; empty unless ``listed``.
        only_expected: Places that only the earlier run has, in order.
        only_actual: Places that only the later run has, in order.
        by_kind: (places that differ, places in common) for each kind in which some differ; empty
            unless ``listed``.
    """

    epoch: int
    step: int
    batch: int
    places: int
    count: int
    differing: list[PlaceDifference]
    only_expected: list[PlaceDifference]
    only_actual: list[PlaceDifference]
    by_kind: Mapping[str, tuple[int, int]]


def compare_batches(expected: Batch, actual: Batch, *, listed: bool = True) -> BatchComparison:
    """Compare the probes of one batch with their counterparts, place by place.

    Unless ``listed``, places are only counted, which takes a tenth of the time.
    """
    match = match_layouts(tuple(expected.layouts), tuple(actual.layouts))
    ours, theirs = expected.digests(), actual.digests()
    one = ours if match.expected is None else [ours[n] for n in match.expected]
    other = theirs if match.actual is None else [theirs[n] for n in match.actual]
    differing: list[PlaceDifference] = []
    places: Sequence[ProbeKey] = ()
    if one == other:
        count = 0
    elif listed:
        places = _list_places(expected.layouts)
        numbers = range(expected.size) if match.expected is None else match.expected
        differing = [
            PlaceDifference(n + expected.offset, *places[n], a.hex(), b.hex())
            for n, a, b in zip(numbers, one, other, strict=True)
            if a != b
        ]
        count = len(differing)
    else:
        count = sum(map(ne, one, other))
    common = len(one)
    if expected.step != actual.step:
        values = str(expected.step), str(actual.step)
        differing.insert(0, PlaceDifference(expected.offset, OTHER, "global step", 0, *values))
        count, common = count + 1, common + 1
    return BatchComparison(
        epoch=expected.epoch,
        step=actual.step,
        batch=expected.batch,
        places=common,
        count=count,
        differing=differing,
        only_expected=[
            PlaceDifference(expected.offset + n, *place, ours[n].hex(), None)
            for n, place in match.only_expected
        ],
        only_actual=[
            PlaceDifference(actual.offset + n, *place, None, theirs[n].hex())
            for n, place in match.only_actual
        ],
        by_kind=_count_kinds(places, differing),
    )


class LayoutMatch(NamedTuple):
    """The indices of the places that are counterparts; None if all are, in order."""

    expected: list[int] | None
    actual: list[int] | None
    only_expected: list[tuple[int, ProbeKey]]
    only_actual: list[tuple[int, ProbeKey]]


# A training has few layouts.
@lru_cache(maxsize=4)
def match_layouts(expected: tuple[bytes, ...], actual: tuple[bytes, ...]) -> LayoutMatch:
    """Return which places of two batches are counterparts, given the layouts of their parts."""
    if expected == actual:
        return LayoutMatch(None, None, [], [])
    ours = {place: n for n, place in enumerate(_list_places(expected))}
    theirs = {place: n for n, place in enumerate(_list_places(actual))}
    common = [place for place in ours if place in theirs]
    return LayoutMatch(
        [ours[place] for place in common],
        [theirs[place] for place in common],
        [(n, place) for place, n in ours.items() if place not in theirs],
        [(n, place) for place, n in theirs.items() if place not in ours],
    )


def _list_places(tokens: Iterable[bytes]) -> list[ProbeKey]:
    return [place for token in tokens for place in unpack_places(token)]


def _count_kinds(
    places: Sequence[ProbeKey], differing: list[PlaceDifference]
) -> dict[str, tuple[int, int]]:
    if not differing:
        return {}
    found = Counter(entry.kind for entry in differing)
    sizes = Counter(kind for kind, _, _ in places)
    return {kind: (count, max(count, sizes[kind])) for kind, count in found.items()}
