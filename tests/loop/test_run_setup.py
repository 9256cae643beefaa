"""Two processes, with DDP and Accelerate: ranks agree, and a rank that differs is named."""

import json
from pathlib import Path

from rank_processes import run_ranks

from lightning_d9m.comparison.ledgers import compare_ledgers
from lightning_d9m.ledger.folder import read_ledger
from lightning_d9m.loop.recorder import find_ranks

SCRIPT = Path(__file__).parents[1] / "support" / "loop_training.py"


def test_two_ranks(tmp_path):
    run_ranks(SCRIPT, 2, tmp_path)
    one, other = (json.loads((tmp_path / f"found-{rank}.json").read_text()) for rank in range(2))
    of_peers, of_own = one.pop("refused"), other.pop("refused")
    assert of_peers == [["D9mError", "Rank 1 failed,"]] * 2
    assert [kind for kind, _ in of_own] == ["LedgerError", "CheckpointError"]
    assert one == other
    for folders in ([one["first"], one["second"]], one["accelerated"]):
        ledgers = [read_ledger(folder) for folder in folders]
        assert list(ledgers[0].files) == [0, 1]
        assert compare_ledgers(*ledgers).verdict == "equal"
        losses = [ledgers[0].outcome(rank).last.loss for rank in (0, 1)]
        assert losses[0] != losses[1]  # each rank has a part of the data
    assert one["drift"] == [1, 0, ["0.weight"]]
    assert one["accelerated drift"] == [1, 0, ["0.weight"]]
    assert one["ends"]


def test_without_a_group_there_is_one_rank():
    ranks, size = find_ranks()
    assert (ranks.rank, ranks.is_alone, size) == (0, True, 1)
