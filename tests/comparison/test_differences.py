"""Two records of any content, and the probes of one batch, are compared exactly."""

from dataclasses import replace

import pytest

from lightning_d9m.comparison.differences import OTHER, batch_difference, record_difference
from lightning_d9m.ledger.format.frames import Batch, pack_places
from lightning_d9m.ledger.format.records import Evaluation


@pytest.mark.parametrize(
    ("expected", "actual", "names"),
    [
        ({"a.b": "inf"}, {"a.b": "nan"}, ('scalars."a.b"',)),
        ({"a": "inf"}, {"b": "inf"}, ("scalars.a", "scalars.b")),
    ],
)
def test_a_leaf_that_differs_is_named_by_its_path(expected, actual, names):
    words = {"name": "test", "epoch": 0, "step": 0, "batches": 1, "outputs": "0" * 32}
    one, other = (Evaluation(scalars=scalars, **words) for scalars in (expected, actual))
    assert record_difference(one, other).names == names
    assert record_difference(one, one) is None


def make_batch(places, *, step=7, offset=0):
    """A batch whose places are given as ``{(kind, name, call): digit of the digest}``."""
    digests = b"".join(bytes([digit] * 16) for digit in places.values())
    return Batch(1, step, 3, offset, (pack_places(places),), digests)


A, B, C = ("output", "a", 0), ("output", "b", 0), ("gradient", "a", 0)
EARLIER = make_batch({A: 1, B: 2, C: 3}, offset=10)


def test_equal_digests_are_counted():
    found = batch_difference(EARLIER, make_batch({A: 1, B: 2, C: 3}))
    assert (found.epoch, found.step, found.batch) == (1, 7, 3)
    assert (found.compared, found.count, found.places, found.by_kind) == (3, 0, [], {})


def test_digests_that_differ_are_listed():
    found = batch_difference(EARLIER, make_batch({A: 1, B: 4, C: 5}))
    assert (found.compared, found.count) == (3, 2)
    assert found.places == [(11, *B, "02" * 16, "04" * 16), (12, *C, "03" * 16, "05" * 16)]
    assert found.by_kind == {"output": (1, 2), "gradient": (1, 1)}


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


def test_places_of_one_run_are_listed_and_the_others_are_compared_by_name():
    later = make_batch({C: 3, A: 9, ("loss", "loss", 0): 6}, offset=20)
    found = batch_difference(EARLIER, later)
    assert (found.compared, found.count) == (2, 1)
    assert found.places == [(10, *A, "01" * 16, "09" * 16)]
    alone = [(11, *B, "02" * 16, None), (22, "loss", "loss", 0, None, "06" * 16)]
    assert found.one_sided == alone


def test_another_step_is_a_difference_of_its_own():
    found = batch_difference(EARLIER, make_batch({A: 1, B: 2, C: 3}, step=8))
    assert (found.compared, found.count, found.step) == (4, 1, 8)
    assert found.places == [(10, OTHER, "global step", 0, "7", "8")]
