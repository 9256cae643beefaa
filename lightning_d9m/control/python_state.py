"""Fast seeding, capture and restoration of the generator of Python's module ``random``.

``random.getstate`` makes a Python number of each of the 625 words of its Mersenne Twister, which
takes 29 us between two steps of a training. A copy of their memory takes 5 us.
"""

import ctypes
import random
from _random import Random
from array import array
from functools import cache
from typing import Any, TypeAlias

# struct RandomObject: PyObject_HEAD; int index; uint32_t state[624].
_SIZE = 4 * 625
_Words = ctypes.c_char * _SIZE  # made once: ctypes does not cache a type that has no reference
# Python has no public name for the global generator, whose methods `random` exports.
_GLOBAL: Any = random._inst  # noqa: SLF001 - as above

PythonState: TypeAlias = tuple[bytes, Any] | tuple[Any, ...]
"""Words as they are in memory, and the second normal variate of a pair; or ``getstate()``."""


def seed_python(seed: int) -> None:
    """Do the same as ``random.seed``, without its tests of the type of the seed."""
    Random.seed(_GLOBAL, seed)
    _GLOBAL.gauss_next = None


def save_python() -> PythonState:
    """Return the state for ``load_python``."""
    memory = _find_memory()
    return random.getstate() if memory is None else (memory.raw, _GLOBAL.gauss_next)


def load_python(state: PythonState) -> None:
    """Restore what ``save_python`` returned."""
    memory = _find_memory()
    if memory is None:
        random.setstate(state)
    else:
        memory.raw, _GLOBAL.gauss_next = state


@cache
def _find_memory() -> Any:
    """Return the memory of the words; None in a release of Python that arranges them otherwise.

    Another generator, whose words are known, shows it.
    """
    shown = random.Random(0)  # noqa: S311 - it keeps no secret
    index = object.__basicsize__
    if Random.__basicsize__ < index + _SIZE:
        return None
    _, words, _ = shown.getstate()
    known = array("I", (words[-1], *words[:-1])).tobytes()
    if ctypes.string_at(id(shown) + index, _SIZE) != known:
        return None
    return _Words.from_address(id(_GLOBAL) + index)
