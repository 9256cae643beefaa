"""The outputs of an evaluation, batch by batch, rolled up into one digest."""

from collections.abc import Iterable, Sequence

from xxhash import xxh3_128

from lightning_d9m.engine.hashing.digest import DigestQueue
from lightning_d9m.engine.ledger.format.records import Json

# Batches whose digests are fetched together: waiting for a device after each would slow it down.
_BATCHES = 64


class OutputDigest:
    """Digests the outputs of each batch, in order, without keeping them.

    The digest is XXH3-128 over one line for each batch: the number of its dataloader, its own
    number, and the digest of its outputs. A batch with a value that cannot be read, which counts by
    its type, is counted, and the first such problem is recorded.
    """

    def __init__(self) -> None:
        self._hash = xxh3_128()
        self._queue = DigestQueue()
        self._names: list[str] = []  # of the batches in the queue
        self._batches = 0
        self._undigested = 0
        self._problem: str | None = None

    def add(self, outputs: object, *, loader: int, batch: int) -> None:
        """Read the outputs of one batch."""
        self._batches += 1
        # Counted, not raised: a prediction may return any object. The number is in the record, so
        # that no equal digest hides such a batch.
        reasons: list[str] = []
        self._queue.add_value(outputs, reasons.append)
        self._undigested += bool(reasons)
        self._problem = self._problem or next(iter(reasons), None)
        self._names.append(f"{loader} {batch}")
        if len(self._names) == _BATCHES:
            self._fetch()

    def _fetch(self) -> None:
        for name, digest in zip(self._names, self._queue.fetch(), strict=True):
            self._hash.update(f"{name} {digest}\n".encode())
        self._queue, self._names = DigestQueue(), []

    def as_fields(self) -> dict[str, Json]:
        """Return the fields of a ledger's record; this waits for the device."""
        self._fetch()
        return {
            "batches": self._batches,
            "outputs": self._hash.hexdigest(),
            "undigested": self._undigested,
            "problem": self._problem,
        }


# A process computes the batches of its logical ranks in turn. One digest for each of these ranks,
# joined in their order, does not depend on which process has which.
class LogicalOutputDigest:
    """Digests the outputs of each logical rank, and then those of all.

    The digest is XXH3-128 over one line for each logical rank, in their order: its number, and the
    digest of its outputs.
    """

    def __init__(self, block: range) -> None:
        self._own = {rank: OutputDigest() for rank in block}

    def add(self, outputs: object, *, loader: int, batch: int) -> None:
        """Digest the outputs of one batch, a sequence with those of each logical rank."""
        assert isinstance(outputs, Sequence), "a step of logical ranks returns a list"
        for digest, output in zip(self._own.values(), outputs, strict=False):
            digest.add(output, loader=loader, batch=batch)

    def as_plain(self) -> list[Json]:
        """Return the fields of each logical rank of this process, with its number."""
        return [[rank, digest.as_fields()] for rank, digest in self._own.items()]


def merge_fields(parts: Iterable[list[Json]]) -> dict[str, Json]:
    """Return the fields of a record from what ``as_plain`` returned on each process."""
    ordered = sorted((rank, fields) for part in parts for rank, fields in part)
    lines = "".join(f"{rank} {fields['outputs']}\n" for rank, fields in ordered)
    return {
        "batches": sum(fields["batches"] for _, fields in ordered),
        "outputs": xxh3_128(lines.encode()).hexdigest(),
        "undigested": sum(fields["undigested"] for _, fields in ordered),
        "problem": next((fields["problem"] for _, fields in ordered if fields["undigested"]), None),
    }
