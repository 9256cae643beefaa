"""NumPy's generator is given back as it was, whatever was drawn before and in between."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lightning_d9m.control import numpy_state
from lightning_d9m.control.numpy_state import (
    capture_numpy,
    load_numpy,
    restore_numpy,
    save_numpy,
)


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
        kept, saved = capture_numpy(), save_numpy()
        assert readable(kept) == state() == expected
        for restore, value in ((restore_numpy, kept), (load_numpy, saved)):
            np.random.seed(7)
            for name in inside:
                DRAWS[name]()
            restore(value)
            assert state() == expected


def test_the_memory_of_words_and_variate_is_found():
    assert isinstance(save_numpy(), tuple)


@pytest.mark.parametrize("size", [8, 80])
def test_a_variate_that_is_elsewhere_is_not_written(monkeypatch, size):
    """As in a release of NumPy whose object is another one: then NumPy's own functions serve."""
    original = numpy_state.ctypes.string_at
    monkeypatch.setattr(
        numpy_state.ctypes, "string_at", lambda address, length: original(address, length)[:size]
    )
    numpy_state._find_memory.cache_clear()
    try:
        np.random.seed(1)
        np.random.normal()
        expected, saved = state(), save_numpy()
        assert isinstance(saved, dict)
        for _ in range(2):
            np.random.normal()
        load_numpy(saved)
        assert state() == expected
    finally:
        numpy_state._find_memory.cache_clear()


@pytest.mark.parametrize("make", [np.random.PCG64, np.random.Philox])
def test_another_generator_in_its_place_is_kept_too(make):
    before = np.random.get_bit_generator()
    saved = save_numpy()
    try:
        np.random.set_bit_generator(make(1))
        for save, load in ((capture_numpy, restore_numpy), (save_numpy, load_numpy)):
            kept, first = save(), np.random.rand(3)
            load(kept)
            assert np.random.rand(3).tolist() == first.tolist()
        with pytest.raises(ValueError, match="state must be for"):  # NumPy's own error
            load_numpy(saved)
    finally:
        np.random.set_bit_generator(before)


def test_a_generator_of_the_same_kind_in_its_place_is_kept_too():
    """Its words are at another address."""
    before = np.random.get_bit_generator()
    save_numpy()
    try:
        np.random.set_bit_generator(np.random.MT19937(4))
        expected, saved = state(), save_numpy()
        np.random.rand(3)
        load_numpy(saved)
        assert state() == expected
    finally:
        np.random.set_bit_generator(before)
