"""The difference of two traces of the same batch."""

from typing import NamedTuple

from lightning_d9m.ledger.format.records import ProbeKey
from lightning_d9m.probes.trace import Trace


class TraceDifference(NamedTuple):
    """The difference of two traces.

    Attributes:
        place: The first place, in order of execution.
        expected: Its digest in the first trace; None if that lacks the place.
        actual: Its digest in the second.
        differing: Number of places that differ.
    """

    place: ProbeKey
    expected: str | None
    actual: str | None
    differing: int


def find_difference(expected: Trace, actual: Trace) -> TraceDifference | None:
    """Compare two traces of the same batch by place, in any order."""
    ours = dict(zip(expected.places, expected.queue.fetch(), strict=True))
    theirs = dict(zip(actual.places, actual.queue.fetch(), strict=True))
    places = [*ours, *(place for place in theirs if place not in ours)]
    differing = [place for place in places if ours.get(place) != theirs.get(place)]
    if not differing:
        return None
    first = differing[0]
    return TraceDifference(first, ours.get(first), theirs.get(first), len(differing))
