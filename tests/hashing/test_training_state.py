"""What a snapshot holds: every part of a training's state."""

import json
from collections import deque
from datetime import date
from threading import Lock

import pytest
import torch
from torch import nn
from xxhash import xxh3_128_hexdigest

from lightning_d9m.engine.hashing.training_state import (
    describe_model,
    replicated_names,
    take_partial_snapshot,
)


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


def take_state(value):
    """Return the snapshot of an optimizer that holds a value in a parameter's state."""
    model = nn.Linear(1, 1, bias=False).requires_grad_(requires_grad=False)
    model.weight.fill_(1.0)
    optimizer = torch.optim.SGD([model.weight], lr=1.0)
    optimizer.state[model.weight]["history"] = value
    return take_partial_snapshot(model, [optimizer])


@pytest.mark.parametrize(
    "make",
    [
        lambda x: deque([torch.full((3,), x)]),
        lambda x: deque([x], maxlen=3),
        lambda x: [object(), deque([{"norm": x}])],
        lambda x: (object(), {"inner": [nn.Linear(1, 1), x]}),
        lambda x: {object(): x},
        lambda x: [torch.ones(1, device="meta"), x],
    ],
    ids=["deque of a tensor", "deque", "list", "tuple", "key", "meta tensor"],
)
def test_state_beside_an_object_without_bytes_is_digested(make):
    one, same, other = map(take_state, map(make, (1.0, 1.0, 2.0)))
    assert one.total()["optimizers"] == same.total()["optimizers"] != other.total()["optimizers"]


def test_what_counts_by_its_type_is_named():
    """Otherwise equal digests would say that it is equal."""
    loop = []
    loop.append(loop)
    taken = take_state({"a": [nn.Linear(1, 1)], "b": loop, "c": deque([Lock()]), "d": 1})
    head = "optimizers 0.history.weight: value"
    assert [reason.partition(", ")[0] for reason in taken.undigested] == [
        f"{head}['a'][0] is of type torch.nn.modules.linear.Linear",
        f"{head}['b'][0] is value['b'] itself: a value that holds itself has no digest.",
        f"{head}['c'][0] is of type _thread.lock",
    ]
    assert not take_state(deque([1.0, object(), date(2026, 1, 1)])).undigested


def test_the_extra_state_of_a_module_counts():
    """As a scale that a module keeps as a number, and saves."""

    class Scaled(nn.Linear):
        scale = 0.0

        def get_extra_state(self):
            return self.scale

    model = nn.Sequential(Scaled(1, 1))
    first, model[0].scale = take_partial_snapshot(model), -0.0
    second, model[0].scale = take_partial_snapshot(model), Lock()
    digests = [taken.groups["buffers"]["0._extra_state"] for taken in (first, second)]
    assert digests[0] != digests[1]
    (reason,) = take_partial_snapshot(model).undigested
    assert reason.startswith("buffers 0._extra_state: value is of type _thread.lock")


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
