"""Two processes with DDP on Gloo: ranks are compared, and all of them raise together."""

import json
import signal
from pathlib import Path

import pytest
from rank_processes import start_ranks

from lightning_d9m import read_ledger

SCRIPT = Path(__file__).parents[1] / "support" / "ddp_training.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Train in two processes once for all tests; rank 0 kills rank 1 at the end."""
    folder = tmp_path_factory.mktemp("ddp")
    statuses, outputs = start_ranks(SCRIPT, 2, folder)
    assert statuses == [0, -signal.SIGKILL], outputs
    return folder


@pytest.fixture(scope="module")
def found(folder):
    """Return what each rank found."""
    return [json.loads((folder / f"found-{rank}.json").read_text()) for rank in range(2)]


def test_optimizer_state_that_differs_on_one_rank_raises_on_all(found):
    for error in (entry["change_moment"] for entry in found):
        name = "0.exp_avg.layers.0.weight"
        assert (error["rank"], error["group"], error["names"]) == (1, "optimizers", [name])
        assert (error["epoch"], error["count"]) == (0, 1)
        assert "optimizer entries differ, first " + name in error["message"]


def test_a_folder_that_cannot_be_made_stops_all(found):
    for error in (entry["no folder"] for entry in found):
        assert "No ledger can be made" in error["message"]


def test_a_switch_that_one_rank_lost_stops_all(found):
    first, second = (entry["switch_off"]["message"] for entry in found)
    assert "Rank 1 failed, so this rank 0 stops too" in first
    assert "deterministic" in second


def test_a_rank_that_hangs_is_named_by_the_survivor_and_in_its_ledger(folder):
    """Whatever the load: rank 0 never gets an answer, and reads the state of the process."""
    process = (folder / "pid-1").read_text()
    sentence = f"Rank 1 (process {process}) runs, but did not respond within 3 s: it hangs."
    assert sentence in (folder / "error-0").read_text().splitlines()[-1]
    (run,) = (folder / "hung").iterdir()
    assert sentence in read_ledger(run).outcome(0).end.error
