"""Differences between two tables of values."""

from collections.abc import Mapping
from typing import TypeAlias

from lightning_d9m.ledger.records import (
    Json,
)

# Name, value in the earlier run, value in the later one.
TableValue: TypeAlias = tuple[str, Json, Json]
MISSING = "missing"


def table_differences(expected: Mapping[str, Json], actual: Mapping[str, Json]) -> list[TableValue]:
    """Return (name, expected, actual) for each entry that differs, ``"missing"`` if there is none.

    Values of different types differ: 1 is not True, and 1.0 is not 1.

    >>> table_differences({"a": 1, "b": 2}, {"a": True, "b": 2, "c": None})
    [('a', 1, True), ('c', 'missing', None)]
    """
    differing = []
    for name in expected.keys() | actual.keys():
        one, other = expected.get(name, MISSING), actual.get(name, MISSING)
        if type(one) is not type(other) or one != other:
            differing.append((name, one, other))
    return sorted(differing, key=lambda entry: entry[0])
