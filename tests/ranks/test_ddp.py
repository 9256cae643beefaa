"""Two processes with DDP on Gloo: ranks are compared, and all of them raise together."""

import json
from pathlib import Path

import pytest
from ledger_runs import list_batches
from rank_processes import run_ranks

from lightning_d9m.ledger.folder import read_ledger

SCRIPT = Path(__file__).parents[1] / "support" / "ddp_training.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Train in two processes once for all tests."""
    folder = tmp_path_factory.mktemp("ddp")
    run_ranks(SCRIPT, 2, folder)
    return folder


@pytest.fixture(scope="module")
def found(folder):
    """Return what each rank found."""
    return [json.loads((folder / f"found-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize(
    ("case", "name"),
    [
        ("other moment on rank 1", "0.exp_avg.layers.0.weight"),
        ("other rate on rank 1", "0.group.0"),
    ],
)
def test_optimizer_state_that_differs_on_one_rank_raises_on_all(found, case, name):
    for error in (entry[case] for entry in found):
        assert (error["rank"], error["group"], error["names"]) == (1, "optimizers", [name])
        assert (error["epoch"], error["count"]) == (0, 1)
        assert "optimizer entries differ, first " + name in error["message"]


def test_a_reference_that_one_rank_leaves_stops_all(found):
    first, second = (entry["other statistics on rank 1"] for entry in found)
    assert first["rank"] == second["rank"] == 1
    assert "in the message of rank 1" in first["message"]
    assert "buffers" in second["message"]


def test_a_folder_that_cannot_be_made_stops_all(found):
    for error in (entry["no folder"] for entry in found):
        assert "No ledger can be made" in error["message"]


def test_a_switch_that_one_rank_lost_stops_all(found):
    first, second = (entry["switched off on rank 1"]["message"] for entry in found)
    assert "Rank 1 failed, so this rank 0 stops too" in first
    assert "deterministic" in second


def test_nothing_of_the_run_is_left_on_any_rank(found):
    assert [entry["left"] for entry in found] == [[], []]


def test_no_rank_unpickles_for_us(found):
    """It would run code of the rank that sent it. Lightning does so to agree on its folders."""
    callers = [Path(name) for entry in found for name in entry["unpickles"]]
    assert {path.parent.name for path in callers} == {"trainer"}
    assert not [path for path in callers if "lightning_d9m" in path.parts]


def first_batch(folder, rank):
    """Return digest by place of a rank's first batch."""
    (epoch, _, batch, entries), *_ = list_batches(read_ledger(folder / "probed" / "fit-000"), rank)
    assert (epoch, batch) == (0, 0)
    return dict(entries)


def test_probes_and_replays_change_no_bit(folder):
    plain, probed = (read_ledger(folder / name / "fit-000") for name in ("first", "probed"))
    for rank in (0, 1):
        assert plain.outcome(rank).final == probed.outcome(rank).final


def test_local_gradients_differ_and_reduced_ones_do_not(folder):
    ranks = [first_batch(folder, rank) for rank in (0, 1)]
    kinds = ("local_gradient", "gradient")
    local, reduced = ([own[kind, "layers.0.weight", 0] for own in ranks] for kind in kinds)
    assert local[0] != local[1]
    assert reduced[0] == reduced[1]
    assert reduced[0] not in local


def test_a_replay_that_differs_on_one_rank_stops_both(found):
    first, second = (entry["other output on rank 1"] for entry in found)
    assert (second["step"], second["group"], second["names"]) == (2, "output", ["layers.0"])
    assert "Rank 1 failed" in first["message"]


def test_only_the_ranks_that_are_named_record(folder):
    """One that ends with an error has written what it met before."""
    ledger = read_ledger(folder / "faulty" / "fit-000")
    assert [len(list_batches(ledger, rank)) for rank in (0, 1)] == [0, 3]
