"""Seeds are derived by hashing, and the state of every generator can be put back."""

import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_d9m.control.seeding import (
    capture_host,
    capture_rng,
    derive_seed,
    restore_rng,
    seed_all,
    seed_host,
    seed_micro_batch,
)

SEEDS = st.integers(0, 2**64 - 1)


def draws():
    """Draw from every generator."""
    return (
        random.random(),
        random.gauss(0, 1),
        tuple(np.random.rand(3)),
        np.random.standard_normal(),
        tuple(torch.randn(3).tolist()),
    )


def test_derived_seeds_are_frozen():
    """A later version that derived other seeds would silently change every user's results."""
    assert derive_seed(42, "train") == 10071373084863330564
    assert derive_seed(42, "train", fit=1, rank=2, worker=3, epoch=4, index=5) == (
        4906076316711424567
    )


@pytest.mark.parametrize("bit", range(64))
def test_every_bit_of_a_seed_matters(bit):
    """Of NumPy's and of torch's on a CPU the lower 32: seeded with one word they take no more."""
    seed_all(0)
    before = draws()
    seed_all(1 << bit)
    differs = [a != b for a, b in zip(before, draws(), strict=True)]
    assert all(differs[:2])
    assert differs[2:] == [bit < 32] * 3


def read_state():
    """Read the state by the public functions of each library."""
    numpy = np.random.get_state(legacy=False)
    return (
        random.getstate(),
        numpy["state"]["key"].tolist(),
        {**numpy, "state": numpy["state"]["pos"]},
        torch.get_rng_state().tolist(),
    )


DRAWS = {
    "python": random.random,
    "gauss": lambda: random.gauss(0, 1),
    "numpy": lambda: np.random.rand(3),
    "normal": np.random.normal,
    "torch": lambda: torch.rand(3),
    "one": lambda: torch.randn(1),  # the second of the pair waits in the generator
    "double": lambda: torch.randn(1, dtype=torch.float64),
    "many": lambda: torch.randn(17),
}
some_draws = st.lists(st.sampled_from(sorted(DRAWS)), max_size=5)


@given(SEEDS, some_draws, SEEDS, some_draws)
def test_seeding_and_loading_are_those_of_the_libraries(seed, before, other, inside):
    def draw(names):
        return [str(DRAWS[name]()) for name in names]

    seed_host(seed)
    draw(before)
    expected, saved = read_state(), capture_host()
    assert read_state() == expected
    seed_host(other)
    found = draw(inside), read_state()
    restore_rng(saved)
    assert read_state() == expected
    random.seed(other)
    np.random.seed(other & 0xFFFFFFFF)
    torch.manual_seed(other)
    assert (draw(inside), read_state()) == found


MICRO_BATCH = {"base": 7, "fit": 0, "epoch": 1, "logical_rank": 2, "batch": 3}


@pytest.mark.parametrize("name", list(MICRO_BATCH))
def test_a_micro_batch_draws_by_its_place_whatever_was_drawn_before(name):
    found = []
    for place in (MICRO_BATCH, MICRO_BATCH, MICRO_BATCH | {name: 9}):
        seed_micro_batch(**place)
        found.append(draws())
        draws()
    assert found[0] == found[1]
    assert all(one != other for one, other in zip(found[0], found[2], strict=True))


@pytest.mark.parametrize("make", [np.random.PCG64, np.random.Philox, np.random.MT19937])
def test_another_generator_of_numpy_is_kept_too(make):
    before = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(make(1))
        for capture in (capture_host, capture_rng):
            kept, first = capture(), np.random.rand(3)
            restore_rng(kept)
            assert np.random.rand(3).tolist() == first.tolist()
    finally:
        np.random.set_bit_generator(before)
