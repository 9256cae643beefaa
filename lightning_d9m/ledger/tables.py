"""Differences between two tables of values."""

from collections.abc import Mapping
from typing import Final, TypeAlias

from lightning_d9m.ledger.format.records import Json

# Name, value in the earlier run, value in the later one.
TableValue: TypeAlias = tuple[str, Json, Json]


class _Missing(str):
    """The text ``"missing"`` of a type that no table holds; compare with ``is``."""

    __slots__ = ()


MISSING: Final = _Missing("missing")


def table_differences(expected: Mapping[str, Json], actual: Mapping[str, Json]) -> list[TableValue]:
    """Return (name, expected, actual) for each entry that differs; ``MISSING`` where it is absent.

    Values of different types differ: 1 is not True, and 1.0 is not 1. Floats are compared by their
    bits: 0.0 is not -0.0.

    >>> table_differences({"a": 1, "b": 2}, {"a": True, "b": 2, "c": None})
    [('a', 1, True), ('c', 'missing', None)]
    """
    differing = []
    for name in expected.keys() | actual.keys():
        one, other = expected.get(name, MISSING), actual.get(name, MISSING)
        alike = type(one) is type(other) and one == other
        if not alike or (type(one) is float and one.hex() != other.hex()):
            differing.append((name, one, other))
    return sorted(differing, key=lambda entry: entry[0])
