"""What a snapshot holds: every part of a training's state, and sketches of weights."""

import json
import math
from struct import unpack

import numpy as np
import pytest
import torch
from torch import nn
from xxhash import xxh3_128_hexdigest

from lightning_d9m.engine.hashing import training_state
from lightning_d9m.engine.hashing.shards import FlatLayout
from lightning_d9m.engine.hashing.training_state import (
    describe_model,
    replicated_names,
    sketch_tensors,
    take_partial_snapshot,
)
from lightning_d9m.engine.ledger.format.records import SKETCH_BUCKETS


@pytest.fixture
def model():
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))


def test_a_total_is_the_digest_of_sorted_names_and_digests():
    names = ["50%s", 'a "b"', "\N{GREEK SMALL LETTER ALPHA}", "%(x)s", "z", "B"]
    model = nn.ModuleDict({name: nn.Linear(2, 1) for name in names})
    for _ in range(2):
        taken = take_partial_snapshot(model)
        text = json.dumps(sorted(taken.groups["weights"].items()), separators=(",", ":"))
        assert taken.total()["weights"] == xxh3_128_hexdigest(text.encode())
        with torch.no_grad():
            model["z"].bias += 1


def test_the_prefix_of_compile_is_stripped(model):
    compiled = torch.compile(model, backend="eager")
    assert take_partial_snapshot(compiled) == take_partial_snapshot(model)
    assert describe_model(compiled) == describe_model(model)


def test_a_model_is_described_by_names_shapes_and_dtypes_not_by_values(model):
    description, parameters = describe_model(model)
    assert parameters == 15 + 6 + 8
    model[0].weight.data += 1
    assert describe_model(model)[0] == description
    assert describe_model(model.double())[0] != description
    assert describe_model(nn.Sequential(nn.Linear(4, 3)))[0] != description


def test_parameters_with_digests_of_shards_alone_are_not_compared_across_ranks(model):
    model[0].weight._is_flat_param = True  # of FSDP1 with use_orig_params=False
    assert replicated_names(model) == ["0.bias", "1.bias", "1.weight", "2.bias", "2.weight"]
    layouts = {id(model[0].weight): None}
    assert "0.weight" in replicated_names(model, layouts)


class Warmup:
    """A schedule that is an object, and holds one whose bytes nobody has defined."""

    def __init__(self, steps):
        self.steps = steps
        self.owner = object()

    def __call__(self, step):
        return min(1.0, (step + 1) / self.steps)


def test_a_scheduler_that_holds_any_object_is_digested_by_what_it_can_be():
    def totals(steps):
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, Warmup(steps))
        return take_partial_snapshot(model, [optimizer], [schedule]).total()["schedulers"]

    assert totals(5) == totals(5) != totals(6)


def test_lazy_parameters_count_by_their_type_until_they_have_a_shape():
    model = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d())
    before = take_partial_snapshot(model).groups
    description, parameters = describe_model(model)
    assert parameters == 0
    assert before == take_partial_snapshot(model).groups
    model(torch.ones(2, 4))
    after = take_partial_snapshot(model).groups
    assert before["weights"].keys() == after["weights"].keys()
    assert before["weights"]["0.weight"] != after["weights"]["0.weight"]
    assert describe_model(model)[0] != description
    assert describe_model(model)[1] == 15 + 6


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


@pytest.mark.parametrize("shape", [(40,), (37, 91), (300, 700)])
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


def test_a_sketch_of_any_type_is_that_of_its_numbers_and_leaves_the_memory_alone():
    values = torch.arange(-1000.0, 1200.0)
    types = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    kept = {str(kind): values.bfloat16().to(kind) for kind in types}
    assert len({*sketch_tensors(kept).values()}) == 1
    for tensor in kept.values():
        tensor.untyped_storage().resize_(0)  # as FSDP frees it; NumPy would forbid that


def test_what_has_no_sketch_is_left_out(monkeypatch):
    tensors = {
        "complex": torch.ones(3, dtype=torch.complex64),
        "integer": torch.ones(3, dtype=torch.int64),
        "sparse": torch.eye(3).to_sparse(),
        "empty": torch.ones(0),
        "dense": torch.ones(3),
    }
    assert list(sketch_tensors(tensors)) == ["dense"]
    monkeypatch.setattr(training_state, "MOST_ELEMENTS", 2)
    assert sketch_tensors(tensors) == {}


def test_weights_that_a_rank_holds_whole_are_sketched_on_request():
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    weight = model[0].weight
    layouts = {id(weight): FlatLayout((3, 4), 0, weight.detach().flatten()[:6], (0, 1))}
    taken = take_partial_snapshot(model, layouts=layouts, sketches=True)
    assert list(taken.sketches) == ["0.bias", "1.weight", "1.bias"]
    assert not take_partial_snapshot(model).sketches
