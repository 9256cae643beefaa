"""The layouts of a trace by number: the place of each digest in a record of probes."""

import json
import zlib
from collections import OrderedDict
from functools import lru_cache

from lightning_d9m.ledger.format.fields import ProbeKey
from lightning_d9m.ledger.format.records import ProbeLayout

# A writer refers to layouts of at most this many places in all; older ones may be forgotten.
_MAX_STORED_PLACES = 4_000_000


class Layouts:
    """Stores layouts compressed: a trace may have millions of places.

    Attributes:
        packed: (number of places, the places packed) by number of the layout, oldest first.
    """

    def __init__(self) -> None:
        self.packed: OrderedDict[int, tuple[int, bytes]] = OrderedDict()
        self._places = 0

    def add(self, layout: ProbeLayout) -> None:
        """Add a layout; it replaces an older one of the same number."""
        text = json.dumps(layout.places, separators=(",", ":")).encode("ascii")
        self._places += len(layout.places) - self.size(layout.id)
        self.packed.pop(layout.id, None)
        self.packed[layout.id] = len(layout.places), zlib.compress(text, 1)
        while self._places > _MAX_STORED_PLACES:
            self._places -= self.packed.popitem(last=False)[1][0]

    def size(self, number: int) -> int:
        """Return the number of places of a layout; 0 when it is unknown."""
        return self.packed.get(number, (0, b""))[0]

    def get(self, number: int) -> bytes:
        """Return the token of a layout: equal for two layouts exactly when their places are equal.

        Empty when the layout is unknown.
        """
        return self.packed.get(number, (0, b""))[1]


# A training has few layouts, which recur.
@lru_cache(maxsize=16)
def unpack_places(token: bytes) -> tuple[ProbeKey, ...]:
    """Return the places, in order of execution, of the layout with this token."""
    entries = json.loads(zlib.decompress(token))
    return tuple((kind, name, call) for kind, name, call in entries)
