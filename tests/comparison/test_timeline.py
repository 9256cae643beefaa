"""How far two runs' weights are apart, from their ledgers."""

import math

import torch
from msgspec.structs import replace

from lightning_d9m.engine.hashing.digest import digest
from lightning_d9m.engine.hashing.training_state import sketch_tensors
from lightning_d9m.engine.ledger.format.records import Digests
from lightning_d9m.tools.comparison import timeline
from lightning_d9m.tools.comparison.timeline import (
    OTHERS,
    Distance,
    DistanceSeries,
    measure_distances,
)


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


def test_a_run_without_sketches_has_no_distances():
    one, other = torch.ones(3), torch.zeros(3)
    old = record({"a.w": other, "b.w": one}, sketched=False)
    for sketched in (True, False):
        series = DistanceSeries()
        series.add(record({"a.w": one, "b.w": one}, sketched=sketched), old)
        assert (series.rank_layers(), list(series.unknown)) == ([], ["a.w"])
    assert measure_distances(record({"a": one}), record({"b": one})) == {}


def test_of_several_ranks_the_greatest_distance_counts():
    one, values = torch.ones(2), [1.0, 1.5, 2.0, 1.5, math.inf, 2.0, math.nan, 1.5]
    series, found = DistanceSeries(), []
    for value in values:
        series.add(record({"a.w": one}), record({"a.w": torch.tensor([value, 1.0])}))
        found.append(series.moments[10]["a"].square)
    assert found[:4] == [0.0, 0.25, 1.0, 1.0]
    assert all(map(math.isnan, found[4:]))


def test_epochs_are_bounded_and_tensors_of_a_layer_and_other_layers_add_up(monkeypatch):
    monkeypatch.setattr(timeline, "MAX_KEPT_EPOCHS", 8)
    one = {f"{number}.{leaf}": torch.ones(1) for number in range(5) for leaf in ("w", "b")}
    other = {name: own * (2 + (name[0] == "3")) for name, own in one.items()} | {"0.b": one["0.b"]}
    series = DistanceSeries()
    for epoch in range(100):
        series.add(record(one, epoch=epoch), record(other, epoch=epoch))
        assert len(series.moments) <= 8
    assert sorted(series.epochs.values()) == [0, 16, 32, 48, 64, 80, 96]
    shown = dict(series.list_series(3))
    assert list(shown) == ["3", "1", "2", OTHERS]
    assert shown["3"][10] == Distance(8.0, 18.0, 2)
    assert shown[OTHERS][10] == Distance(3.0, 13.0, 3)
    # A ledger that somebody made, whose epochs do not advance.
    crafted = DistanceSeries()
    for step in range(20):
        crafted.add(*(replace(record(own), step=step) for own in (one, other)))
    assert len(crafted.moments) <= 8
