"""The catalog as ``d9m ops`` shows it."""

import json

from lightning_d9m.ops.patches.catalog.catalog import OPS


def test_the_table_has_a_line_for_each_op(d9m):
    """Name, status, what is done."""
    titles, *lines = d9m("ops")[1].splitlines()
    assert titles.split()[:2] == ["op", "status"]
    assert [line.split()[:2] for line in lines] == [[op.name, op.status] for op in OPS]
    records = json.loads(d9m("ops", "--json")[1])
    assert [record["name"] for record in records] == [op.name for op in OPS]


def test_one_op_is_shown_in_full(d9m):
    """What torch does, why, what is done, since when: all in 100 columns."""
    status, shown, _ = d9m("ops", "put_")
    assert status == 0
    for label in ("with the flag on, torch:", "why:", "instead:", "bits:", "needed:"):
        assert f"\n{label}" in shown
    assert max(map(len, shown.splitlines())) <= 100
    assert json.loads(d9m("ops", "--json", "cumsum")[1])["status"] == "exempt"
    assert "Similar: index_put, index_put_accumulate, put_" in d9m("ops", "put")[2]
