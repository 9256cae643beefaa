"""One fixed binary tree over logical ranks, which decides the order of every sum.

Floating-point addition is not associative, so the bits of a sum depend on how it is bracketed. Here
the number of logical ranks alone decides that. A node covers an aligned range of a power of two of
leaves, cut at the number of leaves; a node whose right child is empty is its left child. With 5
leaves the sum is ``((0 + 1) + (2 + 3)) + 4``.

A process adds the subtrees that lie inside its block. Their roots are all that is
needed to finish the sum, on any process, and in any order of arrival.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

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
        assert 0 <= process < self.processes, f"process {process} does not exist"
        ranks, processes = self.logical_ranks, self.processes
        return range(process * ranks // processes, (process + 1) * ranks // processes)


def find_roots(block: range, leaves: int) -> list[range]:
    """Return the leaves of the largest subtrees inside a contiguous block, in order.

    >>> find_roots(range(1, 5), 8)
    [range(1, 2), range(2, 4), range(4, 5)]
    """
    roots = []
    start = block.start
    while start < block.stop:
        width = 1
        # A parent begins at a multiple of its width, and is cut at the number of leaves.
        while width < leaves and start % (2 * width) == 0:
            if min(start + 2 * width, leaves) > block.stop:
                break
            width *= 2
        roots.append(range(start, min(start + width, leaves)))
        start = roots[-1].stop
    return roots


def count_merges(start: int, stops: Sequence[int], leaves: int) -> list[int]:
    """Return, for each of adjacent nodes, to how many sums before it its value is added.

    Each node ends at a stop, and the first one begins at ``start``. The sums that are held, like
    the digits of a binary counter, are those of the roots of what has come in: at most
    ``ceil(log2(k)) + 1`` for a block of ``k`` leaves that is a subtree.

    >>> count_merges(0, [1, 2, 3, 4, 5], 5)
    [0, 1, 0, 2, 1]
    """
    held = [len(find_roots(range(start, stop), leaves)) for stop in (start, *stops)]
    return [before + 1 - after for before, after in pairwise(held)]
