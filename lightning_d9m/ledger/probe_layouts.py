"""The layouts of a trace by number: the place of each digest in a record of probes."""

import json
import zlib
from collections import OrderedDict
from functools import lru_cache

from lightning_d9m.ledger.records import ProbeKey, ProbeLayout
from lightning_d9m.ledger.schema import FieldError

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
        self._put(layout.id, (len(layout.places), zlib.compress(text, 1)))

    def share(self, other: "Layouts", number: int) -> None:
        """Copy a layout that another file has with the same bytes."""
        self._put(number, other.packed[number])

    def size(self, number: int) -> int:
        """Return the number of places of a layout; 0 when it is unknown."""
        return self.packed.get(number, (0, b""))[0]

    def check_size(self, number: int, size: int) -> None:
        """Check that a record of ``size`` digests fits the layout that it names.

        Raises:
            FieldError: When the layout is unknown or has another number of places.
        """
        known = self.packed.get(number)
        if known is None:
            raise FieldError("layout", f"is {number}, and no record before it says what that is")
        if known[0] != size:
            allowed = f"must be {known[0]} digests of 32 digits, one for each place of its layout"
            raise FieldError("digests", f"{allowed}, and has {size}")

    def agrees(self, number: int, other: "Layouts") -> bool:
        """Return whether both have a layout of this number with equal places."""
        one, two = self.packed.get(number), other.packed.get(number)
        return one is not None and one == two

    def token(self, number: int) -> bytes:
        """Return a value that is equal for two layouts exactly when their places are equal."""
        return self.packed[number][1]

    def _put(self, number: int, entry: tuple[int, bytes]) -> None:
        self._places += entry[0] - self.packed.pop(number, (0, b""))[0]
        self.packed[number] = entry
        while self._places > _MAX_STORED_PLACES:
            self._places -= self.packed.popitem(last=False)[1][0]


# A training has few layouts, which recur.
@lru_cache(maxsize=16)
def unpack_places(token: bytes) -> tuple[ProbeKey, ...]:
    """Return the places, in order of execution, of the layout with this token."""
    entries = json.loads(zlib.decompress(token))
    return tuple((kind, name, call) for kind, name, call in entries)
