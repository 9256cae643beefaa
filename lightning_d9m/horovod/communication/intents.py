"""Announcements of collectives."""

import hashlib
from dataclasses import dataclass


@dataclass(frozen=True)
class CollectiveIntent:
    """The exchange that a rank is about to start.

    Attributes:
        activity: A description, such as ``"the barrier 'pre_setup'"``.
        items: The parts of the exchange, such as the parameters that have gradients.
    """

    activity: str
    items: tuple[str, ...] = ()

    def fingerprint(self) -> int:
        """Return a 62-bit hash."""
        text = "\0".join((self.activity, *self.items)).encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 2
