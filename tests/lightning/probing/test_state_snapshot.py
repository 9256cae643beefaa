"""What a step that is run twice may have changed is put back, in every kind of object."""

import logging
import random
from collections import Counter, OrderedDict
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import Dataset

from lightning_d9m.lightning.probing.state_snapshot import StateSnapshot

GENERATORS = {
    "torch": (torch.Generator, lambda own: torch.rand(3, generator=own).tolist()),
    "generator": (np.random.default_rng, lambda own: own.random(3).tolist()),
    "mersenne": (
        lambda: np.random.Generator(np.random.MT19937(5)),
        lambda own: own.standard_normal(3).tolist(),
    ),
    "legacy": (np.random.RandomState, lambda own: own.standard_normal(3).tolist()),
    "python": (random.Random, lambda own: [own.gauss(0, 1) for _ in range(3)]),
}


@given(name=st.sampled_from(sorted(GENERATORS)), before=st.integers(0, 5), after=st.integers(1, 5))
def test_a_generator_draws_again_what_it_drew(name, before, after):
    """Whatever it has drawn already: a private generator is no reason for a false alarm."""
    make, draw = GENERATORS[name]
    model = nn.Module()
    model.generator = make()
    for _ in range(before):
        draw(model.generator)
    state = StateSnapshot(model, ())
    drawn = [draw(model.generator) for _ in range(after)]
    state.restore()
    assert [draw(model.generator) for _ in range(after)] == drawn


@dataclass
class Average:
    """What many a program holds beside its modules."""

    value: torch.Tensor
    count: int = 0


class Augmentation:
    """An object of the program's own, which counts and draws."""

    def __init__(self):
        self.calls = 0
        self.generator = np.random.default_rng(1)
        self.parent = self

    def __call__(self, value):
        self.calls += 1
        self.last = value
        return value + self.generator.random()


def test_objects_of_the_program_are_put_back():
    model = nn.Module()
    model.average, model.augment = Average(torch.zeros(2)), Augmentation()
    held, augment = model.average, model.augment
    state = StateSnapshot(model, ())
    first = model.augment(1.0)
    model.average.count += 1
    model.average.value += 5
    state.restore()
    assert model.average is held
    assert model.augment is augment
    assert (held.count, held.value.tolist(), augment.calls) == (0, [0, 0], 0)
    assert not hasattr(augment, "last")
    assert model.augment(1.0) == first


class Samples(Dataset):
    """As large as it likes, and not a step's to change."""

    def __init__(self):
        self.samples = [0]


@pytest.mark.parametrize("value", [Samples(), logging.getLogger("d9m"), print, Dataset, object()])
def test_what_libraries_made_or_extend_is_left_alone(value):
    model = nn.Module()
    model.value = value
    state = StateSnapshot(model, ())
    if isinstance(value, Samples):
        value.samples = [1]
    state.restore()
    assert model.value is value
    assert not isinstance(value, Samples) or value.samples == [1]


def test_tables_of_every_kind_keep_their_entries():
    model = nn.Module()
    model.counts, model.order = Counter("aab"), OrderedDict(b=1, a=2)
    state = StateSnapshot(model, ())
    model.counts["c"] += 1
    model.order["b"] = 7
    model.order.move_to_end("b")
    state.restore()
    assert model.counts == Counter("aab")
    assert list(model.order.items()) == [("b", 1), ("a", 2)]


def test_what_cannot_be_written_to_is_not_copied():
    """An array of four terabytes, as a mapped file may be."""
    model = nn.Module()
    model.samples = np.broadcast_to(np.float32(1), 2**40)
    state = StateSnapshot(model, ())
    state.restore()
    assert model.samples.shape == (2**40,)
