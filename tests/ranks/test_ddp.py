"""Two processes with DDP on Gloo: ranks are compared, and all of them raise together."""

import json
from pathlib import Path

import pytest
from two_ranks import train_on_two_ranks

from lightning_d9m.comparison.ledgers import compare_ledgers
from lightning_d9m.ledger.folder import read_ledger

SCRIPT = Path(__file__).parents[1] / "support" / "ddp_training.py"


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    """Train in two processes once for all tests; return what each rank found, and the ledgers."""
    folder = tmp_path_factory.mktemp("ddp")
    train_on_two_ranks(SCRIPT, folder)
    found = [json.loads((folder / f"found-{rank}.json").read_text()) for rank in range(2)]
    return folder, found


def test_both_ranks_leave_equal_evidence_of_the_weights(outcome):
    folder, _ = outcome
    ledger = read_ledger(folder / "first" / "fit-000")
    assert list(ledger.files) == [0, 1]
    finals = [ledger.outcome(rank).final for rank in (0, 1)]
    assert finals[0].totals["weights"] == finals[1].totals["weights"]


def test_a_second_run_agrees_on_every_rank(outcome):
    folder, _ = outcome
    ledgers = [read_ledger(folder / name / "fit-000") for name in ("first", "second")]
    comparison = compare_ledgers(*ledgers)
    assert comparison.equal
    assert [rank.rank for rank in comparison.ranks] == [0, 1]


def test_one_ulp_on_one_rank_raises_on_all(outcome):
    _, found = outcome
    for error in (entry["one ulp on rank 1"] for entry in found):
        assert error["rank"] == 1
        assert error["names"] == ["layers.0.weight"]
        assert (error["epoch"], error["count"]) == (1, 1)
        assert "Ranks 0 and 1 differ from each other" in error["message"]


@pytest.mark.parametrize(
    ("case", "name"),
    [
        ("other moment on rank 1", "0.exp_avg.layers.0.weight"),
        ("other rate on rank 1", "0.group.0"),
    ],
)
def test_optimizer_state_that_differs_on_one_rank_raises_on_all(outcome, case, name):
    _, found = outcome
    for error in (entry[case] for entry in found):
        assert (error["rank"], error["group"], error["names"]) == (1, "optimizers", [name])
        assert (error["epoch"], error["count"]) == (0, 1)
        assert "optimizer entries differ, first " + name in error["message"]


def test_a_reference_that_one_rank_leaves_stops_all(outcome):
    _, found = outcome
    first, second = (entry["other statistics on rank 1"] for entry in found)
    assert first["rank"] == second["rank"] == 1
    assert "in the message of rank 1" in first["message"]
    assert "buffers" in second["message"]


def test_a_folder_that_cannot_be_made_stops_all(outcome):
    _, found = outcome
    for error in (entry["no folder"] for entry in found):
        assert "No ledger can be made" in error["message"]


def test_a_switch_that_one_rank_lost_stops_all(outcome):
    _, found = outcome
    first, second = (entry["switched off on rank 1"]["message"] for entry in found)
    assert "Rank 1 failed, so this rank 0 stops too" in first
    assert "deterministic" in second


def test_nothing_of_the_run_is_left_on_any_rank(outcome):
    _, found = outcome
    assert [entry["left"] for entry in found] == [[], []]


def test_no_rank_unpickles_for_us(outcome):
    """It would run code of the rank that sent it. Lightning does so to agree on its folders."""
    _, found = outcome
    callers = [Path(name) for entry in found for name in entry["unpickles"]]
    assert {path.parent.name for path in callers} == {"trainer"}
    assert not [path for path in callers if "lightning_d9m" in path.parts]
