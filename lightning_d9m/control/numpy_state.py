"""NumPy's legacy global generator, captured and restored in a few microseconds.

``np.random.get_state`` and ``set_state`` take a tenth of a millisecond each, for they go through
Python word by word: too much for every batch of a small model. The 624 words and the position of a
Mersenne Twister lie in memory at an address that NumPy publishes (``BitGenerator.ctypes``). What
lies elsewhere is the second normal variate of a pair, when one is waiting. Whether one is cannot be
asked quickly, but seen: a normal variate that is drawn then changes no word.
"""

import ctypes
import sys
from typing import Any

import numpy as np

# struct mt19937_state: uint32 key[624]; int pos.
_KEY_BYTES = 624 * 4
_SIZE = _KEY_BYTES + 4
# Made once: ctypes forgets an array type that nobody keeps.
_Memory = ctypes.c_char * _SIZE


def capture_numpy() -> dict[str, Any]:
    """Return what ``np.random.get_state(legacy=False)`` does."""
    memory = _find_memory()
    if memory is None:
        return dict(np.random.get_state(legacy=False))  # noqa: NPY002 - the global one is meant
    words = memory.raw
    variate = np.random.standard_normal()  # noqa: NPY002
    waiting = memory.raw == words
    state = {
        "bit_generator": "MT19937",
        "state": {
            "key": np.frombuffer(words[:_KEY_BYTES], dtype=np.uint32).copy(),
            "pos": int.from_bytes(words[_KEY_BYTES:], sys.byteorder),
        },
        "has_gauss": int(waiting),
        "gauss": variate if waiting else 0.0,
    }
    restore_numpy(state)
    return state


def restore_numpy(state: dict[str, Any]) -> None:
    """Do what ``np.random.set_state`` does."""
    memory = _find_memory()
    if memory is None or state["bit_generator"] != "MT19937" or state["has_gauss"]:
        np.random.set_state(state)  # noqa: NPY002
        return
    np.random.seed(0)  # noqa: NPY002 - forgets a variate that waits
    words = state["state"]
    memory.raw = words["key"].tobytes() + words["pos"].to_bytes(4, sys.byteorder)


def _find_memory() -> Any:
    """Return the generator's memory; None where a user has put another generator in its place."""
    generator = np.random.mtrand.get_bit_generator()
    if type(generator) is not np.random.MT19937:
        return None
    return _Memory.from_address(generator.ctypes.state_address)
