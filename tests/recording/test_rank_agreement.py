"""Digests across ranks: the rank that differs is named, the same on every rank."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_d9m.ledger.format.records import Digests, End
from lightning_d9m.recording.rank_agreement import StepDigests, compare_ranks

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


@pytest.mark.parametrize(
    ("steps", "said"),
    [((20, 22), "22. They were still equal after step 20."), ((None, 1), "1.")],
)
def test_the_steps_between_which_ranks_began_to_differ(steps, said):
    lines = str(compare_ranks([SAME, ODD], EPOCH, steps=steps)).splitlines()
    assert lines[3] == f"The ranks differed in this after step {said}"


def find_first(*ranks):
    """Return what each rank finds if they gather their rows."""
    rows = []
    for rank in ranks:
        rank.find_first(lambda own: rows.append(own) or [own])
    (found,) = {repr(rank.find_first(lambda _: rows)): 0 for rank in ranks}
    return ranks[0].find_first(lambda _: rows), found


def train(rank, steps, drift=None, group="weights"):
    for step in steps:
        if rank.wants(step):
            groups = {"weights": {"w": f"{step:032x}"}, "optimizers": {"0.group.0": "0" * 32}}
            if drift is not None and step >= drift:
                groups[group] = dict.fromkeys(groups[group], "f" * 32)
            rank.add(step, groups)


@given(st.integers(1, 3000), st.sampled_from(["weights", "optimizers"]), st.data())
def test_the_steps_before_and_after_a_drift_are_found(steps, group, data):
    """Of many steps they are close to it; each of at most 32 is kept."""
    drift = data.draw(st.integers(1, steps))
    ranks = StepDigests(), StepDigests(), StepDigests()
    for number, rank in enumerate(ranks):
        train(rank, range(1, steps + 1), drift if number == 1 else None, group)
    assert len(ranks[0].kept) <= 32
    found = find_first(*ranks)[0]
    if steps <= 32:
        assert found == {group: (drift - 1 or None, drift)}
    elif found:
        equal, first = found[group]
        assert (equal or 0) < drift <= first
        assert first - (equal or 0) <= steps / 16
    else:  # after the last step that is kept
        assert steps - drift <= steps / 16


def test_nothing_is_found_after_the_ranks_agreed():
    ranks = StepDigests(), StepDigests()
    train(ranks[0], range(1, 10), 5)
    train(ranks[1], range(1, 10))
    for rank in ranks:
        rank.kept.clear()
    assert find_first(*ranks)[0] == {}


def test_steps_that_only_one_rank_has_are_not_compared():
    ranks = StepDigests(), StepDigests()
    train(ranks[0], range(1, 10))
    train(ranks[1], range(1, 6), 6)
    assert find_first(*ranks)[0] == {}
