"""Collective calls: an error on one rank is raised on all, so that no rank waits for another.

Framework-free: ranks communicate through a function that the caller passes.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

from lightning_d9m.errors import D9mError, RanksDisagreeError

Result = TypeVar("Result")
# Ranks do not know how much the others have, and a collective needs equal sizes. They gather this
# many bytes at first, with the size in front, which is enough for most texts: one collective.
_FIRST_BYTES = 2**12
_CHUNK_BYTES = 2**22  # then; those of all ranks may be on a device together
_SIZE_BYTES = 8  # data begin with their size
_SHORT_BYTES = 16  # of a fingerprint, or whether a rank failed, with its size

Exchange: TypeAlias = Callable[[bytes], list[bytes]]
"""Gathers bytes from all ranks, each of which passes equally many, a multiple of 8; returns those
of each rank, in order of ranks, the same on every rank."""


class Ranks:
    """The ranks of a run, seen from one of them.

    ``exchange`` gathers bytes from all ranks; None for a single rank.
    """

    def __init__(self, rank: int, exchange: Exchange | None = None) -> None:
        self.rank = rank
        self._exchange = exchange

    @property
    def is_alone(self) -> bool:
        """True if the group has one rank."""
        return self._exchange is None

    def raise_on_all(self, func: Callable[[], Result]) -> Result:
        """Call a function, and raise on every rank if it raises on any.

        ``func`` must not communicate with other ranks.

        Raises:
            D9mError: When it failed on another rank; that rank raises its own error.
        """
        # A rank that raised at once would leave the others in their next collective until that
        # times out.
        problem: Exception | None = None
        try:
            result = func()
        except Exception as error:  # noqa: BLE001 - it is raised below, when the others know
            problem = error
        try:
            rows = self.gather_bytes(b"" if problem is None else b"1", first=_SHORT_BYTES)
            failed = [rank for rank, row in enumerate(rows) if row]
        except Exception:
            if problem is None:
                raise
            failed = []  # this rank's own error explains more than that of the gather
        if problem is not None:
            raise problem
        if failed:
            raise D9mError(
                f"Rank {failed[0]} failed, so this rank {self.rank} stops too; the cause "
                f"is in the message of rank {failed[0]}."
            )
        return result

    def gather_json(self, value: Any) -> list[Any]:
        """Return the JSON value that each rank passes, in order of ranks; each rank calls this."""
        # Not `all_gather_object`: it pickles, and unpickling what another process sends runs code.
        return [json.loads(row) for row in self.gather_bytes(json.dumps(value).encode())]

    def gather_bytes(
        self, own: bytes, *, first: int = _FIRST_BYTES, on_first_rank: bool = False
    ) -> list[bytes]:
        """Return the bytes that each rank passes, in order of ranks; each rank calls this.

        Args:
            own: The bytes of this rank.
            first: How many are gathered at first, a multiple of 8. If no rank has more, ranks wait
                for each other once.
            on_first_rank: Whether other ranks than the first get only their own.
        """
        if self._exchange is None:
            return [own]
        data = len(own).to_bytes(_SIZE_BYTES, "little") + own
        keeps = self.rank == 0 or not on_first_rank
        rows = [*map(bytearray, self._exchange(data[:first].ljust(first, b"\0")))]
        sizes = [int.from_bytes(row[:_SIZE_BYTES], "little") for row in rows]
        # What ranks gather has a multiple of the length of an integer.
        end = -(-(_SIZE_BYTES + max(sizes)) // _SIZE_BYTES) * _SIZE_BYTES
        for at in range(first, end, _CHUNK_BYTES):
            length = min(_CHUNK_BYTES, end - at)
            parts = self._exchange(data[at : at + length].ljust(length, b"\0"))
            if keeps:
                for row, part in zip(rows, parts, strict=True):
                    row.extend(part)
        if not keeps:
            return [own]
        return [
            bytes(row[_SIZE_BYTES : _SIZE_BYTES + size])
            for row, size in zip(rows, sizes, strict=True)
        ]


_MAX_NAMES = 8  # that a message lists of a rank


def agree(ranks: Ranks, activity: str, items: Sequence[str] = ()) -> None:
    """Wait until every rank announces the same activity and items; so this is also a barrier.

    Args:
        ranks: The ranks, seen from this one.
        activity: A description, such as ``"the barrier 'pre_setup'"``.
        items: The parts of it, such as the parameters that are sent.

    Raises:
        RanksDisagreeError: They differ; raised on every rank.
    """
    # Ranks that agree, as they nearly always do, exchange 16 bytes. Only to name a difference they
    # exchange the texts.
    digest = hashlib.blake2b("\0".join((activity, *items)).encode(), digest_size=8).digest()
    if len(set(ranks.gather_bytes(digest, first=_SHORT_BYTES))) == 1:
        return
    found = ranks.gather_json([activity, [*items]])
    common = set(items).intersection(*(items_there for _, items_there in found))
    lines = []
    for rank, (name, items_there) in enumerate(found):
        others = [item for item in items_there if item not in common]
        named = ", ".join(others[:_MAX_NAMES]) + ", ..." * (len(others) > _MAX_NAMES)
        lines.append(f"  rank {rank}: {name}" + (f" with {named}" if others else ""))
    raise RanksDisagreeError(
        "The ranks are about to do different things and cannot continue:\n" + "\n".join(lines),
        intents=tuple(name for name, _ in found),
    )
