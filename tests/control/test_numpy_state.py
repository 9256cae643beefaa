"""NumPy's generator is given back as it was, whatever was drawn before and in between."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lightning_d9m.control.numpy_state import _SIZE, _find_memory, capture_numpy, restore_numpy


def isolated():
    """Draw, and put the state back as Lightning's isolate_rng does."""
    before = np.random.get_state()
    np.random.normal(size=3)
    np.random.set_state(before)


DRAWS = {
    "normal": np.random.normal,
    "uniform": lambda: np.random.rand(3),
    "integers": lambda: np.random.randint(0, 9, 5),
    "seed": lambda: np.random.seed(5),
    "block": lambda: np.random.rand(700),
    "isolated": isolated,
}


def state():
    return readable(np.random.get_state(legacy=False))


def readable(found):
    return (
        found["bit_generator"],
        found["state"]["key"].tolist(),
        found["state"]["pos"],
        found["has_gauss"],
        found["gauss"],
    )


draws = st.lists(st.sampled_from(sorted(DRAWS)), max_size=4)


# The same words twice: the second time, a variate waits beside them.
@example(1, [(["seed", "normal", "normal"], []), (["seed", "normal"], ["uniform"])])
@given(st.integers(0, 2**32 - 1), st.lists(st.tuples(draws, draws), max_size=4))
def test_what_was_drawn_in_between_leaves_no_trace(seed, rounds):
    np.random.seed(seed)
    for outside, inside in rounds:
        for name in outside:
            DRAWS[name]()
        expected = state()
        kept = capture_numpy()
        assert readable(kept) == expected
        np.random.seed(7)
        for name in inside:
            DRAWS[name]()
        restore_numpy(kept)
        assert state() == expected


def test_the_memory_is_the_words_and_the_position():
    np.random.seed(3)
    np.random.rand(5)
    found = np.random.get_state(legacy=False)["state"]
    words = np.frombuffer(_find_memory().raw, dtype=np.uint32)
    assert words.nbytes == _SIZE
    assert words[:624].tolist() == found["key"].tolist()
    assert words[624] == found["pos"]


@pytest.mark.parametrize("make", [np.random.PCG64, np.random.Philox])
def test_another_generator_in_its_place_is_kept_too(make):
    before = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(make(1))
        kept, first = capture_numpy(), np.random.rand(3)
        restore_numpy(kept)
        assert np.random.rand(3).tolist() == first.tolist()
    finally:
        np.random.set_bit_generator(before)
