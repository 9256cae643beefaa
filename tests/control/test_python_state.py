"""Python's generator is seeded and given back as by the functions of ``random``."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_d9m.control import python_state
from lightning_d9m.control.python_state import load_python, save_python, seed_python

DRAWS = {
    "random": random.random,
    "gauss": lambda: random.gauss(0, 1),
    "bits": lambda: random.getrandbits(70),
    "bytes": lambda: random.randbytes(2600),
    "seed": lambda: random.seed("text"),
}

draws = st.lists(st.sampled_from(sorted(DRAWS)), max_size=4)


@given(st.integers(0, 2**64 - 1), draws)
def test_seeding_is_that_of_random(seed, before):
    states = []
    for function in (random.seed, seed_python):
        for name in before:
            DRAWS[name]()
        function(seed)
        states.append(random.getstate())
    assert states[0] == states[1]


@given(st.integers(0, 2**64 - 1), draws, draws)
def test_what_was_drawn_in_between_leaves_no_trace(seed, before, inside):
    random.seed(seed)
    for name in before:
        DRAWS[name]()
    expected, saved = random.getstate(), save_python()
    for name in inside:
        DRAWS[name]()
    load_python(saved)
    assert random.getstate() == expected


def test_the_memory_of_the_words_is_found():
    assert isinstance(save_python()[0], bytes)


@pytest.mark.parametrize("name", ["_SIZE", "content"])
def test_words_that_are_elsewhere_are_not_written(monkeypatch, name):
    """As in a release of Python whose object is another one: then the functions of it serve."""
    if name == "content":
        monkeypatch.setattr(python_state.ctypes, "string_at", lambda address, size: bytes(size))
    else:
        monkeypatch.setattr(python_state, "_SIZE", 2600)
    python_state._find_memory.cache_clear()
    try:
        random.gauss(0, 1)
        expected, saved = random.getstate(), save_python()
        assert saved == expected
        random.gauss(0, 1)
        load_python(saved)
        assert random.getstate() == expected
    finally:
        python_state._find_memory.cache_clear()
