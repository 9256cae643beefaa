"""Assignment of logical ranks to processes."""

from dataclasses import dataclass

from lightning_d9m.errors import SettingError


@dataclass(frozen=True, slots=True)
class Blocks:
    """Contiguous blocks of logical ranks, one for each process.

    Process ``p`` of ``P`` owns the logical ranks from ``p * V // P`` up to, but without,
    ``(p + 1) * V // P``. If ``P`` does not divide ``V``, the sizes differ by at most one.

    >>> [list(Blocks(6, 4).of(process)) for process in range(4)]
    [[0], [1, 2], [3], [4, 5]]

    Attributes:
        logical_ranks: The number of logical ranks.
        processes: The number of processes, at most ``logical_ranks``.

    Raises:
        SettingError: A number is not allowed.
    """

    logical_ranks: int
    processes: int

    def __post_init__(self) -> None:
        for name in ("logical_ranks", "processes"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise SettingError(f"{name}={value!r} is not allowed: pass a whole number from 1.")
        if self.processes > self.logical_ranks:
            raise SettingError(
                f"There are {self.processes} processes, but only {self.logical_ranks} logical "
                f"ranks, so some processes would have nothing to compute: start at most "
                f"{self.logical_ranks} processes, or raise logical_ranks to {self.processes} or "
                "more, which changes the bits of the training."
            )

    def of(self, process: int) -> range:
        """Return the logical ranks of a process."""
        if not 0 <= process < self.processes:
            raise SettingError(
                f"process={process!r} is not allowed: there are the processes 0 to "
                f"{self.processes - 1}."
            )
        ranks, processes = self.logical_ranks, self.processes
        return range(process * ranks // processes, (process + 1) * ranks // processes)

    def owner(self, logical_rank: int) -> int:
        """Return the process that owns a logical rank."""
        if not 0 <= logical_rank < self.logical_ranks:
            raise SettingError(
                f"logical_rank={logical_rank!r} is not allowed: there are the logical ranks 0 to "
                f"{self.logical_ranks - 1}."
            )
        # The largest p with p * V // P <= v, that is, with p * V < (v + 1) * P.
        return ((logical_rank + 1) * self.processes - 1) // self.logical_ranks

    @property
    def largest(self) -> int:
        """The number of logical ranks in the largest block."""
        return -(-self.logical_ranks // self.processes)
