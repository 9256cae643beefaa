"""Two records of any content are compared exactly, in bounded memory."""

import tracemalloc

import pytest

from lightning_d9m.comparison.record_diff import record_difference
from lightning_d9m.ledger.format.records import Opaque


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
