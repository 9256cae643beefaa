"""Ranks act together: what fails on one of them is raised on all, so that none waits for another.

Framework-free: ranks talk through a function that is passed in.
"""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from lightning_d9m.errors import D9mError

Result = TypeVar("Result")


class Gather(Protocol):
    """Gathers int64 numbers from all ranks; each rank calls it with the same count of numbers."""

    def __call__(self, numbers: Sequence[int], /) -> list[list[int]]:
        """Return one list for each rank, in order of ranks, the same on every rank."""
        ...


class Ranks:
    """The ranks of a run, seen from one of them.

    Args:
        rank: This rank.
        gather: How ranks talk; None when there is one rank.
    """

    def __init__(self, rank: int, gather: Gather | None = None) -> None:
        self.rank = rank
        self.gather = gather

    def together(self, act: Callable[[], Result]) -> Result:
        """Act, and raise on every rank when it fails on any.

        ``act`` itself must not talk to other ranks.

        Raises:
            D9mError: When it failed on another rank; that rank raises its own error.
        """
        problem: Exception | None = None
        try:
            result = act()
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

    def _ranks_where(self, fact: bool) -> list[int]:
        """Return the ranks on which ``fact`` is so."""
        if self.gather is None:
            return [self.rank] if fact else []
        return [rank for rank, row in enumerate(self.gather([int(fact)])) if row[0]]
