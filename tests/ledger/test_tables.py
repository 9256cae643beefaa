"""Two values are equal only if their types and bits are."""

import pytest

from lightning_d9m.ledger.tables import MISSING, table_differences


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (0.0, -0.0),
        (1, 1.0),
        (1, True),
        (0, False),
        (None, "None"),
        ("a", "b"),
        (1.0, 1.0000000000000002),
    ],
)
def test_values_that_differ_in_type_or_bits(one, other):
    assert table_differences({"x": one}, {"x": other}) == [("x", one, other)]
    assert table_differences({"x": other}, {"x": one}) == [("x", other, one)]


@pytest.mark.parametrize("value", [0.0, -0.0, 1, True, None, "missing", [], {}])
def test_equal_values(value):
    assert table_differences({"x": value}, {"x": value}) == []


@pytest.mark.parametrize("value", ["missing", None, "", 0])
def test_a_field_that_one_table_lacks(value):
    """Also where the other one holds the text "missing"."""
    ((name, one, other),) = table_differences({}, {"x": value})
    assert name == "x"
    assert one is MISSING
    assert other is value
    ((_, one, other),) = table_differences({"x": value}, {})
    assert one is value
    assert other is MISSING
