"""Digests of the probes of one batch."""

import struct
from dataclasses import dataclass, field

from lightning_d9m.ledger.format.fields import DIGEST_BYTES
from lightning_d9m.ledger.format.probe_frames import Frames

# A batch with more places is compared in parts of about so many, which bounds memory.
BATCH_PART_PLACES = 2**17


@dataclass(slots=True)
class Batch:
    """Consecutive frames of one batch.

    Attributes:
        epoch: Counted from 0.
        step: The global step when the batch began.
        batch: Index within the epoch.
        offset: Number of places of the batch in the frames before these.
        parts: The digests of each frame.
        layouts: The token of the layout of each frame.
        size: Number of places.
    """

    epoch: int
    step: int
    batch: int
    offset: int
    parts: list[bytes] = field(default_factory=list)
    layouts: list[bytes] = field(default_factory=list)
    size: int = 0

    def add(self, frame: Frames) -> None:
        """Append a frame."""
        self.parts.append(frame.digests)
        self.layouts.append(frame.layout)
        self.size += frame.size

    def digests(self) -> tuple[bytes, ...]:
        """Return the digests in order of execution."""
        return struct.unpack(f"{DIGEST_BYTES}s" * self.size, b"".join(self.parts))
