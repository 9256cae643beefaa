"""Digests of the probes of one batch."""

import struct
from dataclasses import dataclass, field

from lightning_d9m.ledger.probe_layouts import Layouts
from lightning_d9m.ledger.records import DIGEST_DIGITS, ProbesRecord

# A batch with more places is compared in parts of about so many, which bounds memory.
BATCH_PART_PLACES = 2**17


@dataclass(slots=True)
class Batch:
    """Consecutive records of the probes of one batch.

    Attributes:
        epoch: Counted from 0.
        step: The global step when the batch began.
        batch: Index within the epoch.
        offset: Number of places of the batch in the records before these.
        parts: The records.
        layouts: The token of the layout of each record.
        size: Number of places.
    """

    epoch: int
    step: int
    batch: int
    offset: int
    parts: list[ProbesRecord] = field(default_factory=list)
    layouts: list[bytes] = field(default_factory=list)
    size: int = 0

    def add(self, record: ProbesRecord, layouts: Layouts) -> None:
        """Append a record, read just now."""
        self.parts.append(record)
        self.layouts.append(layouts.token(record.layout))
        self.size += len(record.digests) // DIGEST_DIGITS

    def digests(self) -> tuple[bytes, ...]:
        """Return the digests in order of execution."""
        text = "".join(part.digests for part in self.parts).encode("ascii")
        return struct.unpack(f"{DIGEST_DIGITS}s" * self.size, text)

    def extra(self) -> list[str]:
        """Return the fields of the records that this version does not know."""
        return [repr(sorted(part.extra.items())) for part in self.parts if part.extra]
