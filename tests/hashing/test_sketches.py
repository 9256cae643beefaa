"""Two sketches tell how far tensors are apart, whatever the difference looks like."""

import math
from struct import unpack

import numpy as np
import pytest
import torch
from torch import nn

from lightning_d9m.hashing import sketches
from lightning_d9m.hashing.shards import FlatLayout
from lightning_d9m.hashing.sketches import sketch_tensors
from lightning_d9m.hashing.training_state import take_partial_snapshot
from lightning_d9m.ledger.format.records import SKETCH_BUCKETS

KNOWN_SMALL = [6.0, 7.0, -8.0, 1.0, -2.0, -3.0, -4.0, 5.0]
KNOWN_LARGE = [4683655.0, 550144.0, -3040195.0, 3917782.0]
KNOWN_LARGE += [-4792368.0, 2509000.0, 2289386.0, -2770470.0]


def read(sketch):
    """Return the numbers of a sketch."""
    return np.array(unpack(f"<{SKETCH_BUCKETS}d", bytes.fromhex(sketch)))


def estimate(one, other):
    """Return the estimated norm of the difference of two tensors."""
    first, second = map(read, sketch_tensors({"one": one, "other": other}).values())
    return math.sqrt(((first - second) ** 2).sum())


def draw(*shape, seed=0):
    """Draw a tensor from a generator of its own."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(40,), (1021,), (37, 91), (300, 200), (300, 700)])
def test_the_square_is_unbiased_and_its_error_known(shape):
    # Differences that are drawn anew for each trial have the spread that random signs would have.
    squares = []
    for seed in range(40):
        weights = draw(*shape, seed=1000)
        changed = weights + 1e-3 * draw(*shape, seed=seed)
        true = (changed.double() - weights.double()).norm().item()
        squares.append((estimate(weights, changed) / true) ** 2)
    # A square has the variance 2 / SKETCH_BUCKETS; the bounds are four standard errors of a mean.
    spread = math.sqrt(2 / SKETCH_BUCKETS)
    assert abs(np.mean(squares) - 1) < 4 * spread / math.sqrt(len(squares))
    assert 0.5 * spread < np.std(squares) < 1.6 * spread


def test_a_sketch_is_the_same_on_every_day():
    """The signs follow from a text, so that runs of years are comparable."""
    known = sketch_tensors({"a": torch.arange(1.0, 9.0), "b": torch.arange(70_000.0)})
    assert read(known["a"]).tolist() == KNOWN_SMALL
    assert read(known["b"]).tolist() == KNOWN_LARGE


def test_what_has_no_sketch_is_left_out(monkeypatch):
    tensors = {
        "complex": torch.ones(3, dtype=torch.complex64),
        "integer": torch.ones(3, dtype=torch.int64),
        "sparse": torch.eye(3).to_sparse(),
        "empty": torch.ones(0),
        "dense": torch.ones(3),
    }
    assert list(sketch_tensors(tensors)) == ["dense"]
    monkeypatch.setattr(sketches, "MOST_ELEMENTS", 2)
    assert sketch_tensors(tensors) == {}


def test_values_that_are_not_finite_show_in_the_sketch():
    for value in (math.nan, math.inf):
        weights = draw(2000)
        weights[1500] = value
        assert not np.isfinite(read(sketch_tensors({"a": weights})["a"])).all()


def test_weights_that_a_rank_holds_whole_are_sketched_on_request():
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    weight = model[0].weight
    layouts = {id(weight): FlatLayout((3, 4), 0, weight.detach().flatten()[:6], (0, 1))}
    taken = take_partial_snapshot(model, layouts=layouts, sketches=True)
    assert list(taken.sketches) == ["0.bias", "1.weight", "1.bias"]
    assert taken.finish({("weights", "0.weight"): "0" * 32}).sketches == taken.sketches
    assert not take_partial_snapshot(model).sketches
