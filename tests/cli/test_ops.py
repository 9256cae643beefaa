"""The catalog as ``d9m ops`` shows it."""

import json

from lightning_d9m.patches.catalog.catalog import OPS


def test_the_table_has_a_line_for_each_op(d9m):
    """Name, status, what is done."""
    status, out, _ = d9m("ops")
    titles, *lines = out.splitlines()
    assert status == 0
    assert titles.split()[:2] == ["op", "status"]
    assert [line.split()[:2] for line in lines] == [[op.name, op.status] for op in OPS]


def test_one_op_is_shown_in_full(d9m):
    """What torch does, why, what is done, since when: all in 100 columns."""
    status, shown, _ = d9m("ops", "put_")
    assert status == 0
    for label in ("with the flag on, torch:", "why:", "instead:", "bits:", "needed:"):
        assert f"\n{label}" in shown
    assert max(map(len, shown.splitlines())) <= 100


def test_json_is_for_programs(d9m):
    """A list, or one object for one op."""
    records = json.loads(d9m("ops", "--json")[1])
    assert [record["name"] for record in records] == [op.name for op in OPS]
    assert json.loads(d9m("ops", "--json", "cumsum")[1])["status"] == "exempt"


def test_unknown_names_are_misuse(d9m):
    """The error names similar ops."""
    status, _, err = d9m("ops", "put")
    assert status == 2
    assert "Similar: index_put, index_put_accumulate, put_" in err
