"""How far two runs' weights are apart, from their ledgers."""

import math

import pytest
import torch
from msgspec.structs import replace

from lightning_d9m.comparison import timeline
from lightning_d9m.comparison.timeline import (
    OTHERS,
    Distance,
    DistanceSeries,
    measure_distances,
)
from lightning_d9m.hashing.digest import digest
from lightning_d9m.hashing.training_state import sketch_tensors
from lightning_d9m.ledger.format.records import Digests


def record(weights, *, epoch=0, sketched=True):
    """Return the record of weights at the end of an epoch."""
    return Digests(
        moment="epoch",
        epoch=epoch,
        step=10 * epoch + 10,
        totals={},
        groups={"weights": {name: digest(own) for name, own in weights.items()}},
        sketches=sketch_tensors(weights) if sketched else {},
    )


def test_the_distance_of_a_small_tensor_is_exact():
    one, other = torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.5])
    found = measure_distances(record({"a.bias": one}), record({"a.bias": other}))["a.bias"]
    assert (found.square, found.norm, found.differing) == (0.25, 29.25, 1)
    assert found.relative == pytest.approx(0.5 / math.sqrt(29.25))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_are_not_finite_have_no_distance(value):
    one, other = torch.ones(3), torch.tensor([1.0, value, 1.0])
    found = measure_distances(record({"a": one}), record({"a": other}))["a"]
    assert math.isnan(found.relative)
    series = DistanceSeries()
    series.add(record({"a.w": one, "b.w": one}), record({"a.w": one * 2, "b.w": other}))
    assert series.rank_layers() == ["b", "a"]


def test_a_run_without_sketches_has_no_distances():
    one, other = torch.ones(3), torch.zeros(3)
    old = record({"a.w": other, "b.w": one}, sketched=False)
    for sketched in (True, False):
        series = DistanceSeries()
        series.add(record({"a.w": one, "b.w": one}, sketched=sketched), old)
        assert (series.rank_layers(), list(series.unknown)) == ([], ["a.w"])
    assert measure_distances(record({"a": one}), record({"b": one})) == {}


def test_tensors_of_a_layer_and_layers_beyond_the_shown_ones_add_up():
    names = ["a.weight", "a.bias", "b.weight", "c.weight", "c.inner.weight"]
    one = {name: torch.full((4,), 2.0) for name in names}
    # Norms of 16 and 16; squares of differences of 1 and 9, then 16, 0 and 4.
    changes = [0.5, 1.5, 2.0, 0.0, 1.0]
    other = {name: one[name] + change for name, change in zip(names, changes, strict=True)}
    series = DistanceSeries()
    series.add(record(one), record(other))
    assert series.rank_layers() == ["b", "a", "c.inner"]
    assert series.moments[10]["a"].square == 4 * (0.25 + 2.25)
    shown = dict(series.list_series(1))
    assert list(shown) == ["b", OTHERS]
    others = shown[OTHERS][10]
    assert (others.square, others.differing) == (4 * (0.25 + 2.25 + 1.0), 3)
    assert others.norm == 4 * (2.5**2 + 3.5**2 + 2.0**2 + 3.0**2)


def test_of_several_ranks_the_greatest_distance_counts():
    one, near, far = torch.ones(2), torch.full((2,), 1.5), torch.full((2,), 2.0)
    broken = torch.tensor([math.nan, 1.0])
    for order in ((near, broken, far), (broken, far, near)):
        series = DistanceSeries()
        for other in (one, near, far):
            series.add(record({"a.w": one}), record({"a.w": other}))
        assert series.moments[10]["a"].square == 2.0
        for other in order:
            series.add(record({"a.w": one}), record({"a.w": other}))
        assert math.isnan(series.moments[10]["a"].relative)


def test_epochs_are_bounded(monkeypatch):
    monkeypatch.setattr(timeline, "MAX_KEPT_EPOCHS", 8)
    one = {f"{number}.w": torch.ones(1) for number in range(5)}
    other = {name: own * 2 for name, own in one.items()}
    series = DistanceSeries()
    for epoch in range(100):
        series.add(record(one, epoch=epoch), record(other, epoch=epoch))
        assert len(series.moments) <= 8
    assert sorted(series.epochs.values()) == [0, 16, 32, 48, 64, 80, 96]
    shown = dict(series.list_series(3))
    assert list(shown) == ["0", "1", "2", OTHERS]
    assert shown[OTHERS][10] == Distance(2.0, 8.0, 2)
    # A ledger that somebody made, whose epochs do not advance.
    crafted = DistanceSeries()
    for step in range(20):
        crafted.add(*(replace(record(own), step=step) for own in (one, other)))
    assert len(crafted.moments) <= 8
