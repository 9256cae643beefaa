"""A model's parameters and buffers are found again as soon as it holds others."""

import pytest
import torch
from torch import nn

from lightning_d9m.hashing.training_state import ModelTensors


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_a_roster_has_what_a_torchscript_module_has():
    """Its tables are no dicts, so they cannot be watched."""
    model = nn.Sequential(torch.jit.script(nn.BatchNorm1d(2)))
    roster = ModelTensors(model)
    assert list(roster.parameters) == ["0.weight", "0.bias"]
    assert list(roster.buffers) == ["0.running_mean", "0.running_var", "0.num_batches_tracked"]
    model[0].weight = nn.Parameter(torch.zeros(2))
    assert torch.equal(roster.parameters["0.weight"], torch.zeros(2))


def replace_parameter(model):
    model[0].weight = nn.Parameter(torch.zeros(2, 2))


def replace_directly(model):
    model[0]._parameters["weight"] = nn.Parameter(torch.zeros(2, 2))


def rename(model):
    model[0]._parameters["kernel"] = model[0]._parameters.pop("weight")


def add_module(model):
    model.append(nn.Linear(2, 2))


def add_deep(model):
    model[1].append(nn.Linear(2, 2))


def remove(model):
    model[0].bias = None


def exchange(model):
    model[0], model[1][0] = model[1][0], model[0]


def replace_buffer(model):
    model[1][1].running_mean = torch.ones(2)


CHANGES = [
    replace_parameter,
    replace_directly,
    rename,
    add_module,
    add_deep,
    remove,
    exchange,
    replace_buffer,
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_roster_has_what_the_model_has(change):
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    roster = ModelTensors(model, lambda _: True)
    before = (roster.parameters, roster.buffers)
    assert before[0] is roster.parameters
    assert before[1] is roster.buffers
    change(model)
    for own, entries in (
        (roster.parameters, model.named_parameters()),
        (roster.buffers, model.named_buffers()),
    ):
        expected = dict(entries)
        assert list(own) == list(expected)
        assert all(own[name] is tensor for name, tensor in expected.items())
    assert roster.names == {id(own): name for name, own in model.named_parameters()}


def test_a_roster_selects_by_name_and_names_all():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    roster = ModelTensors(model, lambda name: name.startswith("1."))
    assert list(roster.parameters) == ["1.weight", "1.bias"]
    assert len(roster.names) == 4
