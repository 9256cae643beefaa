"""NumPy's legacy global generator, kept and given back in a microsecond.

``np.random.get_state`` and ``set_state`` take a tenth of a millisecond each, for they go through
Python word by word: too much for every batch of a small model. The 624 words and the position of a
Mersenne Twister lie in memory at an address that NumPy publishes (``BitGenerator.ctypes``). What
lies elsewhere is the second normal variate of a pair, when one is waiting. Whether one is cannot be
asked quickly; but none is where none was and no word has changed since.
"""

import ctypes
from typing import Any

import numpy as np

# struct mt19937_state: uint32 key[624]; int pos.
_SIZE = 624 * 4 + 4


class _Known:
    """The words at which, when they were last looked at, no variate was waiting."""

    words: bytes | None = None


class NumpyState:
    """The state of the generator when this was made."""

    def __init__(self) -> None:
        self._memory = _find_memory()
        self._words = None if self._memory is None else self._memory.raw
        self._whole: dict[str, Any] | None = None
        if self._words is None or self._words != _Known.words:
            whole: dict[str, Any] = np.random.get_state(legacy=False)  # noqa: NPY002
            if self._words is None or whole["has_gauss"]:
                self._whole = whole

    def give_back(self) -> None:
        """Put the generator back into this state."""
        if self._whole is not None:
            _Known.words = None
            np.random.set_state(self._whole)  # noqa: NPY002 - the global generator is meant
            return
        np.random.seed(0)  # noqa: NPY002 - forgets a variate that waits
        self._memory.raw = _Known.words = self._words


def _find_memory() -> Any:
    """Return the generator's memory; None where a user has put another generator in its place."""
    generator = np.random.mtrand.get_bit_generator()
    if type(generator) is not np.random.MT19937:
        return None
    return (ctypes.c_char * _SIZE).from_address(generator.ctypes.state_address)
