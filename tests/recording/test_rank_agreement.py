"""Digests across ranks: the rank that differs is named, the same on every rank."""

import pytest

from lightning_d9m.ledger.format.records import Digests, End
from lightning_d9m.recording.rank_agreement import compare_ranks

SAME = {"w": "a" * 32, "b": "b" * 32}
EPOCH = Digests(moment="epoch", epoch=4, step=115, totals={}, groups={})
ODD = {"w": "a" * 32, "b": "c" * 32}


THIRD = {"w": "d" * 32, "b": "d" * 32}


@pytest.mark.parametrize("count", [1, 2, 5])
def test_ranks_that_agree_are_equal(count):
    assert compare_ranks([SAME] * count, EPOCH) is None
    assert compare_ranks([{}] * count, EPOCH) is None  # parameters that are all sharded


@pytest.mark.parametrize(
    ("tables", "rank", "expected_rank", "names"),
    [
        ((ODD, SAME), 1, 0, ("b",)),  # nothing tells which of two is wrong
        ((SAME, SAME, ODD, SAME), 2, 0, ("b",)),
        ((ODD, SAME, SAME), 0, 1, ("b",)),
        ((SAME, ODD, THIRD), 1, 0, ("b",)),  # rank 0 is as good as any
        ((SAME, {"w": "a" * 32, "x": "b" * 32}), 1, 0, ("names of the entries",)),
    ],
)
def test_rank_0_is_expected_unless_it_alone_differs(tables, rank, expected_rank, names):
    found = compare_ranks(tables, EPOCH)
    assert (found.rank, found.expected_rank, found.names) == (rank, expected_rank, names)
    if names == ("b",):
        assert (found.count, found.total) == (1, 2)
        sides = (tables[expected_rank]["b"], tables[rank]["b"])
        assert (found.expected, found.actual) == sides


def test_the_error_says_who_differs_from_whom_where_and_in_what():
    """All the facts are attributes."""
    names = [f"layers.{number}.weight" for number in range(20)]
    table = dict.fromkeys(names, "a" * 32)
    other = table | dict.fromkeys(names[3:17], "b" * 32)
    error = compare_ranks([table, table, other], EPOCH)
    assert str(error) == (
        "Rank 2 differs from rank 0 in epoch 4 (step 115): 14 of 20 weights differ, first "
        "layers.3.weight, layers.4.weight, layers.5.weight and 11 more.\n"
        f"  rank 0 (reference): {'a' * 16}\n"
        f"  rank 2:             {'b' * 16}\n"
        "All ranks must hold the same bits after each step. Look for what only one rank does: "
        "a change to its weights, a learning rate that follows its own metric (log the metric "
        "with sync_dist=True), a module that is not synchronized, a failing device."
    )
    assert (error.moment, error.epoch, error.step, error.rank) == ("epoch", 4, 115, 2)
    assert (error.group, error.count, error.total) == ("weights", 14, 20)
    assert error.names == tuple(names[3:13])
    assert (error.expected, error.actual) == ("a" * 32, "b" * 32)
    assert error.expected_rank == 0
    drift = End.failed(error).drift
    assert (drift.moment, drift.epoch, drift.step, drift.rank) == ("epoch", 4, 115, 2)
    assert (drift.group, drift.name) == ("weights", "layers.3.weight")
    # Nothing tells which of two ranks is wrong.
    message = str(compare_ranks([{"w": "a" * 32}, {"w": "b" * 32}], EPOCH))
    assert message.startswith(
        "Ranks 0 and 1 differ from each other in epoch 4 (step 115): 1 of 1 weights differ, "
        f"first w.\n  rank 0: {'a' * 16}\n  rank 1: {'b' * 16}\n"
    )
