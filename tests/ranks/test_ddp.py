"""Two processes with DDP on Gloo: ranks are compared, and all of them raise together."""

import json
from pathlib import Path

import pytest
from rank_processes import run_ranks

SCRIPT = Path(__file__).parents[1] / "support" / "ddp_training.py"


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Train in two processes once for all tests; return what each rank found."""
    folder = tmp_path_factory.mktemp("ddp")
    run_ranks(SCRIPT, 2, folder)
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
