"""A micro-batch draws the same numbers on whichever process it runs."""

import random

import numpy as np
import pytest
import torch

from lightning_d9m.logical_ranks.rng import seed_micro_batch

PLACE = {"fit": 0, "epoch": 1, "logical_rank": 2, "batch": 3}


def draw():
    return random.random(), np.random.rand(), torch.rand(1).item()


def test_a_micro_batch_draws_the_same_numbers_whatever_was_drawn_before():
    seed_micro_batch(7, **PLACE)
    first = draw()
    draw()
    seed_micro_batch(7, **PLACE)
    assert draw() == first


@pytest.mark.parametrize("name", list(PLACE))
def test_every_coordinate_changes_all_generators(name):
    seed_micro_batch(7, **PLACE)
    first = draw()
    seed_micro_batch(7, **PLACE | {name: 9})
    assert all(one != other for one, other in zip(first, draw(), strict=True))


def test_the_seed_of_the_run_changes_all_generators():
    seed_micro_batch(7, **PLACE)
    first = draw()
    seed_micro_batch(8, **PLACE)
    assert all(one != other for one, other in zip(first, draw(), strict=True))
