"""Two records of any content, and the probes of one batch, are compared exactly."""

import tracemalloc
from dataclasses import replace

import pytest

from lightning_d9m.comparison.differences import OTHER, batch_difference, record_difference
from lightning_d9m.ledger.format.frames import Batch, Layouts
from lightning_d9m.ledger.format.records import Opaque, ProbeLayout


def nested(last, *, levels=8, items=20_000, key="k" * 4000):
    """Return a table whose leaves would have paths of megabytes, or gigabytes in all."""
    value = [*range(items - 1), last]
    for _ in range(levels):
        value = {key: value}
    return Opaque("note", {"small": 1, "large": value})


def test_paths_that_would_fill_the_memory_are_left_out():
    tracemalloc.start()
    try:
        assert record_difference(nested(1), nested(1)) is None
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 400 * 2**20  # the paths of 20,000 leaves have 640 MB


@pytest.mark.parametrize("last", [2, True, 1.0, None, "1", [1], {"1": 1}])
def test_each_difference_there_is_found(last):
    difference = record_difference(nested(1), nested(last))
    assert (difference.names, difference.count) == (("large",), 1)


@pytest.mark.parametrize(
    ("expected", "actual", "names"),
    [
        ({"a": {"b": [1, 2]}}, {"a": {"b": [1, 3]}}, ("a.b[1]",)),
        ({"a.b": 1}, {"a": {"b": 1}}, ('"a.b"', "a.b")),
        ({"a[0]": 1}, {"a": [1]}, ('"a[0]"', "a[0]")),
        ({"a": {"b": 1}}, {"a": {"c": 1}}, ("a.b", "a.c")),
        ({"a": []}, {"a": {}}, ("a",)),
        ({"a": 0.0}, {"a": -0.0}, ("a",)),
        ({"a": {"b": 1}}, {"a": {"b": True}}, ("a.b",)),
    ],
)
def test_a_leaf_that_differs_is_named_by_its_path(expected, actual, names):
    difference = record_difference(Opaque("note", expected), Opaque("note", actual))
    assert difference.names == names
    assert record_difference(Opaque("note", expected), Opaque("note", dict(expected))) is None


def make_batch(places, *, step=7, offset=0):
    """A batch whose places are given as ``{(kind, name, call): digit of the digest}``."""
    layouts = Layouts()
    layouts.add(ProbeLayout(0, tuple(places)))
    digests = b"".join(bytes([digit] * 16) for digit in places.values())
    return Batch(1, step, 3, offset, (layouts.get(0),), digests)


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
