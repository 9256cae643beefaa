"""The outputs of an evaluation, batch by batch, rolled up into one digest."""

from xxhash import xxh3_128

from lightning_d9m.errors import DigestError
from lightning_d9m.hashing.digest import digest_value
from lightning_d9m.ledger.records import MAX_NAME, Json


class OutputDigest:
    """Digests the outputs of each batch, in order, without keeping them.

    The digest is XXH3-128 over one line for each batch: the number of its dataloader, its own
    number, and the digest of its outputs. A batch whose outputs have no digest (an object of a
    user's class) is counted, and the first such problem is recorded.
    """

    def __init__(self) -> None:
        self._hash = xxh3_128()
        self._batches = 0
        self._undigested = 0
        self._problem: str | None = None

    def add(self, outputs: object, *, loader: int, batch: int) -> None:
        """Digest the outputs of one batch."""
        self._batches += 1
        try:
            digest = digest_value(outputs)
        except DigestError as error:
            self._undigested += 1
            self._problem = self._problem or str(error)[:MAX_NAME]
            digest = "none"
        self._hash.update(f"{loader} {batch} {digest}\n".encode())

    def as_fields(self) -> dict[str, Json]:
        """Return the fields of a ledger's record."""
        problem = {"undigested": self._undigested, "problem": self._problem}
        return {
            "batches": self._batches,
            "outputs": self._hash.hexdigest(),
            **(problem if self._undigested else {}),
        }
