"""The same bits on every machine.

Every operation that torch dispatches comes in; its result goes out, computed from operations that
IEEE 754 defines. Read ``mode.py`` first, then ``registry.py`` with the table of rules.
``formulas.py``, ``triton/kernels.py`` and, of random numbers, ``kernels.py`` say the sequences that
``kernels.c`` computes.
"""

import threading

active = threading.local()
"""Has ``count`` while the operations of a thread are computed portably.

``running`` are those that it takes apart, the innermost last.
"""


def is_portable() -> bool:
    """Return whether the operations of this thread are computed portably."""
    return bool(getattr(active, "count", 0))
