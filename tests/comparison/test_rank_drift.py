"""The first place at which the entry that ended a run differs between ranks."""

import pytest
from ledger_runs import make_probes

from lightning_d9m.engine.ledger.folder import read_ledger
from lightning_d9m.tools.comparison.causes import find_rank_cause
from lightning_d9m.tools.comparison.ledgers import find_rank_drift, reference_rank

PLACES = (("weight", "a.weight"), ("gradient", "a.weight"), ("buffer", "a.mean"))
WEIGHT = {"moment": "epoch", "epoch": 0, "step": 23, "rank": 1, "group": "weights"}
KNOWN = WEIGHT | {"name": "a.weight"}


def find(runs, *, world_size=2, changes=(), places=PLACES, known=KNOWN, **header):
    """Write a run with probes and find its drift; ``changes`` are (rank, first step, kind)."""

    def digest(rank, step, kind):
        changed = any((r, k) == (rank, kind) and first <= step for r, first, k in changes)
        return (rank + 1) * changed

    def edit(rank, records):
        batches = [[digest(rank, step, kind) for kind, _ in places] for step in range(4)]
        records[3:3] = make_probes(places, batches)
        if known is not None:
            records[-1] |= {"status": "failed", "drift": known}

    path = runs.write(1, edit=edit, world_size=world_size, **header)
    return find_rank_drift(read_ledger(path))


def place(drift):
    return drift.rank, drift.moment, drift.step, drift.kind, drift.name


def test_a_weight_of_one_rank(runs):
    drift = find(runs, changes=[(1, 2, "weight"), (1, 3, "gradient"), (1, 1, "buffer")])
    assert place(drift) == (1, "batch", 2, "weight", "a.weight")
    assert (drift.batch, drift.count, drift.compared) == (2, 1, 3)
    assert (drift.expected, drift.actual) == ("00" * 16, "02" * 16)
    assert find(runs, changes=[(1, 2, "weight")], known=None) is None
    assert "different weights, which" in find_rank_cause(drift).text


def test_what_is_sharded_does_not_count(runs):
    """A gradient that differs from the start may be a part, as are probes of a sharded model."""
    drift = find(runs, changes=[(1, 0, "gradient"), (1, 3, "weight")])
    assert place(drift)[1:4] == ("batch", 3, "weight")
    drift = find(runs, changes=[(1, 2, "gradient"), (1, 3, "weight")])
    assert place(drift)[1:4] == ("batch", 2, "gradient")
    assert find(runs, changes=[(1, 0, "gradient")]) is None
    stack = {"world.sharded_parameters": 1}
    assert find(runs, changes=[(1, 2, "weight")], stack=stack) is None


def test_a_buffer_that_the_run_names(runs):
    """The other buffer differs earlier, and not by mistake."""
    places = (("weight", "a.weight"), ("buffer", "b.mean"), ("buffer", "a.mean"))
    known = WEIGHT | {"group": "buffers", "name": "a.mean"}
    drift = find(runs, changes=[(1, 2, "buffer")], places=places, known=known)
    assert place(drift) == (1, "batch", 2, "buffer", "a.mean")
    assert "different buffers" in find_rank_cause(drift).text


@pytest.mark.parametrize(
    ("group", "name"), [("weights", "b"), ("buffers", "c.mean"), ("optimizers", "0.group.0")]
)
def test_an_entry_at_the_end_of_an_epoch(runs, group, name):
    def edit(rank, records):
        epochs = [record for record in records if record.get("moment") == "epoch"]
        for record in epochs:
            record["groups"][group] = {name: f"{rank:032x}"}
        last = {key: epochs[-1][key] for key in ("moment", "epoch", "step")}
        records[-1] |= {"drift": WEIGHT | last | {"group": group, "name": name}}
        ends.append(epochs[0]["step"])

    ends = []
    drift = find_rank_drift(read_ledger(runs.write(3, edit=edit, world_size=2)))
    assert place(drift) == (1, "epoch", ends[0], group, name)
    assert drift.count == 1
    assert "hold different" in find_rank_cause(drift).text


def test_rank_0_differs_from_all_others(runs):
    drift = find(runs, world_size=3, changes=[(0, 1, "weight")], known=KNOWN | {"rank": 0})
    assert (drift.rank, reference_rank(drift)) == (0, 1)
    assert (drift.expected, drift.actual) == ("00" * 16, "01" * 16)
