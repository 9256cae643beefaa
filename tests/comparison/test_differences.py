"""Two records of any content, and the probes of one batch, are compared exactly."""

from dataclasses import replace

from lightning_d9m.comparison.differences import batch_difference
from lightning_d9m.ledger.format.records import Batch


def make_batch(places):
    """A batch whose places are given as ``{(kind, name, call): digit of the digest}``."""
    digests = b"".join(bytes([digit] * 16) for digit in places.values())
    return Batch(1, 7, 3, (tuple(places),), digests)


A, B, C = ("output", "a", 0), ("output", "b", 0), ("gradient", "a", 0)
EARLIER = make_batch({A: 1, B: 2, C: 3})


def test_a_place_that_a_batch_has_twice_is_compared_twice():
    """Only a forged ledger has it: probes count the calls of a place."""
    layouts = EARLIER.layouts * 2
    for other in (bytes(16), EARLIER.digests[16:32]):
        one = replace(EARLIER, layouts=layouts, digests=EARLIER.digests * 2)
        changed = replace(one, digests=other + one.digests[16:])
        assert [place.name for place in batch_difference(one, changed).places] == ["a"]
        more = replace(
            changed, layouts=(*layouts, *EARLIER.layouts), digests=one.digests + EARLIER.digests
        )
        assert batch_difference(changed, more).count == 1
