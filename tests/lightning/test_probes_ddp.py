"""Two processes with DDP on Gloo: gradients before and after the ranks exchange them."""

import json
from pathlib import Path

import pytest
from ledger_runs import list_batches
from rank_processes import run_ranks

from lightning_d9m.ledger.folder import read_ledger

SCRIPT = Path(__file__).parents[1] / "support" / "ddp_probing.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Train in two processes once for all tests."""
    folder = tmp_path_factory.mktemp("ddp")
    run_ranks(SCRIPT, 2, folder)
    return folder


def first_batch(folder, rank):
    """Return digest by place of a rank's first batch."""
    (epoch, _, batch, entries), *_ = list_batches(read_ledger(folder / "probed" / "fit-000"), rank)
    assert (epoch, batch) == (0, 0)
    return dict(entries)


def test_probes_and_replays_change_no_bit(folder):
    plain, probed = (read_ledger(folder / name / "fit-000") for name in ("plain", "probed"))
    for rank in (0, 1):
        assert plain.outcome(rank).final == probed.outcome(rank).final


def test_local_gradients_differ_and_reduced_ones_do_not(folder):
    ranks = [first_batch(folder, rank) for rank in (0, 1)]
    kinds = ("local_gradient", "gradient")
    local, reduced = ([own[kind, "layers.0.weight", 0] for own in ranks] for kind in kinds)
    assert local[0] != local[1]
    assert reduced[0] == reduced[1]
    assert reduced[0] not in local


def test_a_fault_on_one_rank_stops_both(folder):
    found = [json.loads((folder / f"found-{rank}.json").read_text()) for rank in (0, 1)]
    assert (found[1]["step"], found[1]["group"], found[1]["names"]) == (2, "output", ["layers.0"])
    assert "Rank 1 failed" in found[0]["message"]


def test_only_the_ranks_that_are_named_record(folder):
    """One that ends with an error has written what it met before."""
    ledger = read_ledger(folder / "faulty" / "fit-000")
    assert [len(list_batches(ledger, rank)) for rank in (0, 1)] == [0, 3]
