"""Fast capture and restoration of NumPy's legacy global generator.

Its state is the 624 words and the position of a Mersenne Twister, whose address NumPy publishes
(``BitGenerator.ctypes``), and the second normal variate of a pair. NumPy does not publish where the
variate is; ``_find_variate`` finds it. ``np.random.get_state`` and ``set_state`` copy the words one
by one in Python, which takes 236 us. The copies here take less than 1 us.
"""

import ctypes
import struct
import sys
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np

# struct mt19937_state: uint32 key[624]; int pos.
_KEY_BYTES = 624 * 4
# In struct aug_bitgen: int has_gauss; double gauss.
_VARIATE = struct.Struct("@id")
# Made once: ctypes does not cache an array type that has no reference.
_Words = ctypes.c_char * (_KEY_BYTES + 4)
_Variate = ctypes.c_char * _VARIATE.size
_get_generator = np.random.mtrand.get_bit_generator

NumpyState: TypeAlias = tuple[bytes, bytes] | dict[str, Any]
"""Words and variate as they are in memory; of another kind of generator what NumPy returns."""


def save_numpy() -> NumpyState:
    """Return the state for ``load_numpy``."""
    memory = _find_memory(_get_generator())
    if memory is None:
        return dict(np.random.get_state(legacy=False))  # noqa: NPY002 - the global generator
    words, variate = memory
    return words.raw, variate.raw


def load_numpy(state: NumpyState) -> None:
    """Restore what ``save_numpy`` returned."""
    memory = _find_memory(_get_generator())
    if memory is None or isinstance(state, dict):
        state = state if isinstance(state, dict) else _decode(*state)
        np.random.set_state(state)  # noqa: NPY002 - the global generator
        return
    words, variate = memory
    words.raw, variate.raw = state


def capture_numpy() -> dict[str, Any]:
    """Return the same as ``np.random.get_state(legacy=False)``."""
    state = save_numpy()
    return state if isinstance(state, dict) else _decode(*state)


def restore_numpy(state: dict[str, Any]) -> None:
    """Do the same as ``np.random.set_state``."""
    if state["bit_generator"] != "MT19937":
        load_numpy(state)
        return
    words = state["state"]
    raw = words["key"].tobytes() + words["pos"].to_bytes(4, sys.byteorder)
    load_numpy((raw, _VARIATE.pack(state["has_gauss"], state["gauss"])))


def _decode(words: bytes, variate: bytes) -> dict[str, Any]:
    has_gauss, gauss = _VARIATE.unpack(variate)
    return {
        "bit_generator": "MT19937",
        "state": {
            "key": np.frombuffer(words[:_KEY_BYTES], dtype=np.uint32).copy(),
            "pos": int.from_bytes(words[_KEY_BYTES:], sys.byteorder),
        },
        "has_gauss": has_gauss,
        "gauss": gauss,
    }


@lru_cache(maxsize=1)
def _find_memory(generator: Any) -> tuple[Any, Any] | None:
    """Return the memory of words and variate; None if the user has replaced the generator."""
    variate = _find_variate()
    if type(generator) is not np.random.MT19937 or variate is None:
        return None
    return _Words.from_address(generator.ctypes.state_address), variate


def _find_variate() -> Any:
    """Return the memory of the variate; None in a release of NumPy where it is not found.

    Another generator, whose variate is known, shows where it is in the object.
    """
    shown = np.random.RandomState(0)
    shown.standard_normal()
    known = _VARIATE.pack(1, shown.get_state(legacy=False)["gauss"])
    offset = ctypes.string_at(id(shown), type(shown).__basicsize__).find(known)
    shown.standard_normal()
    used = _VARIATE.pack(0, shown.get_state(legacy=False)["gauss"])
    if offset < 0 or ctypes.string_at(id(shown) + offset, _VARIATE.size) != used:
        return None
    # NumPy has no public name for the global generator, whose methods `np.random` exports.
    return _Variate.from_address(id(np.random.mtrand._rand) + offset)  # noqa: SLF001 - as above
