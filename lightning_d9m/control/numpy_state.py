"""NumPy's legacy global generator, kept and given back in a few microseconds.

``np.random.get_state`` and ``set_state`` take a tenth of a millisecond each, for they go through
Python word by word: too much for every batch of a small model. The 624 words and the position of a
Mersenne Twister lie in memory at an address that NumPy publishes (``BitGenerator.ctypes``). What
lies elsewhere is the second normal variate of a pair, when one is waiting. Whether one is cannot be
asked quickly, but seen: a normal variate that is drawn then changes no word.
"""

import ctypes
from typing import Any

import numpy as np

# struct mt19937_state: uint32 key[624]; int pos.
_SIZE = 624 * 4 + 4


class NumpyState:
    """The state of the generator when this was made."""

    def __init__(self) -> None:
        self._memory = _find_memory()
        self._whole: dict[str, Any] | None = None
        if self._memory is None:
            self._whole = np.random.get_state(legacy=False)  # noqa: NPY002
            return
        self._words = self._memory.raw
        variate = np.random.standard_normal()  # noqa: NPY002 - the global generator is meant
        if self._memory.raw == self._words:
            whole: dict[str, Any] = np.random.get_state(legacy=False)  # noqa: NPY002
            self._whole = whole | {"has_gauss": 1, "gauss": variate}
        self.give_back()

    def give_back(self) -> None:
        """Put the generator back into this state."""
        if self._whole is not None:
            np.random.set_state(self._whole)  # noqa: NPY002
            return
        np.random.seed(0)  # noqa: NPY002 - forgets a variate that waits
        self._memory.raw = self._words


def _find_memory() -> Any:
    """Return the generator's memory; None where a user has put another generator in its place."""
    generator = np.random.mtrand.get_bit_generator()
    if type(generator) is not np.random.MT19937:
        return None
    return (ctypes.c_char * _SIZE).from_address(generator.ctypes.state_address)
