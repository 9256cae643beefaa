"""A few steps are kept on each rank, the same on all, and the first that differs is found."""

import pytest

from lightning_d9m.recording.rank_agreement import StepDigests


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


@pytest.mark.parametrize("group", ["weights", "optimizers"])
@pytest.mark.parametrize("drift", [1, 7, 30])
def test_the_step_of_a_drift_in_a_short_epoch(group, drift):
    ranks = StepDigests(), StepDigests(), StepDigests()
    for number, rank in enumerate(ranks):
        train(rank, range(1, 31), drift if number == 1 else None, group)
    assert find_first(*ranks)[0] == {group: (drift - 1 or None, drift)}


def test_many_steps_are_thinned_out_and_still_bracket_the_drift():
    ranks = StepDigests(), StepDigests()
    train(ranks[0], range(1, 5001))
    train(ranks[1], range(1, 5001), 4000)
    equal, first = find_first(*ranks)[0]["weights"]
    assert equal < 4000 <= first
    assert first - equal <= 5000 / 16
    wanted = sum(ranks[0].wants(step) for step in range(5001, 10_001))
    assert wanted <= 5000 / 256 + 1


def test_nothing_is_found_after_the_ranks_agreed():
    ranks = StepDigests(), StepDigests()
    train(ranks[0], range(1, 10), 5)
    train(ranks[1], range(1, 10))
    for rank in ranks:
        rank.forget()
    assert find_first(*ranks)[0] == {}


def test_steps_that_only_one_rank_has_are_not_compared():
    ranks = StepDigests(), StepDigests()
    train(ranks[0], range(1, 10))
    train(ranks[1], range(1, 6), 6)
    assert find_first(*ranks)[0] == {}
