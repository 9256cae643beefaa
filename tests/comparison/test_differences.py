"""Two records of any content, and the probes of one batch, are compared exactly."""

from dataclasses import replace

import pytest

from lightning_d9m.comparison.differences import batch_difference, record_difference
from lightning_d9m.ledger.format.records import Batch, Evaluation


@pytest.mark.parametrize(
    ("expected", "actual", "names"),
    [
        ({"a.b": "inf"}, {"a.b": "nan"}, ("scalars.a.b",)),
        ({"a": "inf"}, {"b": "inf"}, ("scalars.a", "scalars.b")),
    ],
)
def test_a_leaf_that_differs_is_named_by_its_path(expected, actual, names):
    words = {"name": "test", "epoch": 0, "step": 0, "batches": 1, "outputs": "0" * 32}
    one, other = (Evaluation(scalars=scalars, **words) for scalars in (expected, actual))
    assert record_difference(one, other).names == names
    assert record_difference(one, one) is None


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
