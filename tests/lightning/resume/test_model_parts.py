"""The parts of a model that are kept between saves are those that a new search finds."""

import random

import pytest
import torch
from torch import nn
from torchmetrics import MeanMetric

from lightning_d9m.control.generators import find_generators
from lightning_d9m.lightning.resume.model_parts import ModelParts


class Noise(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.name, self.noise = 1.0, "noise", None


def make():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), Noise(), nn.ModuleList())
    model[3].append(Noise())
    return model


CHANGES = {
    "nothing": lambda model: None,
    "a number": lambda model: setattr(model[2], "scale", 2.0),
    "a generator in the place of None": lambda model: setattr(model[2], "noise", torch.Generator()),
    "a generator in the place of a number": lambda model: setattr(
        model[3][0], "scale", random.Random(1)
    ),
    "a tensor in the place of None": lambda model: setattr(model[2], "noise", torch.ones(1)),
    "a new attribute": lambda model: setattr(model[0], "noise", [random.Random(1)]),
    "an attribute that replaces another": lambda model: (
        delattr(model[2], "noise"),
        setattr(model[2], "own", random.Random(1)),
    ),
    "a module": lambda model: model.append(Noise()),
    "a module in another's place": lambda model: model.__setitem__(1, nn.Linear(2, 2)),
    "a module less": lambda model: model.__delitem__(2),
    "a metric": lambda model: model[3].append(MeanMetric()),
    "a parameter": lambda model: setattr(model[2], "weight", nn.Parameter(torch.ones(1))),
    "a parameter in another's place": lambda model: setattr(
        model[0], "bias", nn.Parameter(torch.ones(2))
    ),
    "a buffer": lambda model: model[2].register_buffer("b", torch.ones(1)),
}


def describe(parts):
    return (
        [(name, id(module)) for name, module in parts.modules.items()],
        [(name, id(metric)) for name, metric in parts.metrics.items()],
        [(name, id(tensor)) for name, tensor in parts.tensors],
        [name for name, _ in parts.parameters],
        find_generators(parts.searched),
    )


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_the_model_is_seen(change):
    model = make()
    parts = ModelParts(model)
    assert describe(parts) == describe(ModelParts(model))
    CHANGES[change](model)
    assert describe(parts) == describe(ModelParts(model))
    assert describe(parts)[-1] == find_generators(dict(model.named_modules()))
    assert len(find_generators(parts.searched)) == ("generator" in change or "attribute" in change)


def test_an_unchanged_model_is_not_searched_again(monkeypatch):
    model = make()
    parts = ModelParts(model)
    before = describe(parts)
    monkeypatch.setattr(nn.Module, "named_modules", None)
    model[2].scale, model[2].noise = 3, torch.ones(1)
    assert describe(parts) == before
    assert list(parts.searched) == []
