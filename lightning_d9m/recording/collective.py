"""Collective calls: an error on one rank is raised on all, so that no rank waits for another.

Framework-free: ranks communicate through a function that the caller passes.
"""

from array import array
from collections.abc import Callable, Sequence
from typing import TypeAlias, TypeVar

from lightning_d9m.errors import D9mError

Result = TypeVar("Result")
_INTEGER = 8  # bytes of each integer that ranks gather


Gather: TypeAlias = Callable[[Sequence[int]], list[list[int]]]
"""Gathers int64 numbers from all ranks, each of which passes equally many; returns one list for
each rank, in order of ranks, the same on every rank."""


class Ranks:
    """The ranks of a run, seen from one of them.

    Args:
        rank: This rank.
        gather: Gathers integers from all ranks; None for a single rank.
    """

    def __init__(self, rank: int, gather: Gather | None = None) -> None:
        self.rank = rank
        self.gather = gather

    def raise_on_all(self, func: Callable[[], Result]) -> Result:
        """Call a function, and raise on every rank if it raises on any.

        ``func`` must not communicate with other ranks.

        Raises:
            D9mError: When it failed on another rank; that rank raises its own error.
        """
        problem: Exception | None = None
        try:
            result = func()
        except Exception as error:  # noqa: BLE001 - it is raised below, when the others know
            problem = error
        try:
            failed = self._ranks_where(problem is not None)
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

    def broadcast_text(self, text: str) -> str:
        """Return the text that rank 0 passes; each rank calls this.

        Ranks gather integers, because unpickling what another process sends runs its code.
        """
        if self.gather is None:
            return text
        own = text.encode("utf-8", "surrogateescape") if self.rank == 0 else b""
        return self.gather_bytes(own)[0].decode("utf-8", "surrogateescape")

    def gather_bytes(self, own: bytes) -> list[bytes]:
        """Return the bytes that each rank passes, in order of ranks; each rank calls this."""
        if self.gather is None:
            return [own]
        sizes = [row[0] for row in self.gather([len(own)])]
        length = -(-max(sizes) // _INTEGER)
        if not length:
            return [b""] * len(sizes)
        numbers = array("q", own.ljust(length * _INTEGER, b"\0"))
        rows = self.gather(numbers.tolist())
        return [array("q", row).tobytes()[:size] for row, size in zip(rows, sizes, strict=True)]

    def _ranks_where(self, condition: bool) -> list[int]:
        """Return the ranks on which ``condition`` is so."""
        if self.gather is None:
            return [self.rank] if condition else []
        return [rank for rank, row in enumerate(self.gather([int(condition)])) if row[0]]
