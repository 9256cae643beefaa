"""One fixed binary tree over logical ranks, which decides the order of every sum.

Floating-point addition is not associative, so the bits of a sum depend on how it is bracketed. Here
the number of logical ranks alone decides that. A node covers an aligned range of a power of two of
leaves, cut at the number of leaves; a node whose right child is empty is its left child. With 5
leaves the sum is ``((0 + 1) + (2 + 3)) + 4``.

A process adds the subtrees that lie inside its block. Their roots are all that is
needed to finish the sum, on any process, and in any order of arrival.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from lightning_d9m.errors import SettingError

T = TypeVar("T")


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


class Node(NamedTuple):
    """The leaves from ``start`` up to, but without, ``stop``."""

    start: int
    stop: int


def find_parent(left: Node, right: Node, leaves: int) -> Node | None:
    """Return the parent of two nodes of the tree, or None if they are not its two children."""
    width = left.stop - left.start
    # A left child is never cut, so its width is a power of two.
    is_left_child = width & (width - 1) == 0 and left.start % (2 * width) == 0
    parent = Node(left.start, min(left.start + 2 * width, leaves))
    return parent if is_left_child and right == (left.stop, parent.stop) else None


class Fold(Generic[T]):
    """The sums of those complete subtrees whose leaves have come in.

    Like a binary counter, it adds two values as soon as both are there. While a block of ``k``
    leaves that is a subtree comes in, it holds at most ``ceil(log2(k)) + 1`` values.

    Args:
        leaves: The number of leaves of the tree.
        add: Adds the values of a left and a right child. It may change both.
    """

    def __init__(self, leaves: int, add: Callable[[T, T], T]) -> None:
        self._leaves = leaves
        self._add = add
        self.held: list[tuple[Node, T]] = []

    def push(self, node: Node, value: T) -> None:
        """Add the value of the node that follows those that came in before."""
        while self.held and (parent := find_parent(self.held[-1][0], node, self._leaves)):
            value = self._add(self.held.pop()[1], value)
            node = parent
        self.held.append((node, value))


def find_roots(block: range, leaves: int) -> tuple[Node, ...]:
    """Return the roots of the largest subtrees inside a contiguous block, in order.

    >>> find_roots(range(1, 5), 8)
    (Node(start=1, stop=2), Node(start=2, stop=4), Node(start=4, stop=5))
    """
    fold = Fold[None](leaves, lambda _left, _right: None)
    for leaf in block:
        fold.push(Node(leaf, leaf + 1), None)
    return tuple(node for node, _ in fold.held)


def list_roots(blocks: Blocks) -> tuple[tuple[Node, ...], ...]:
    """Return the roots of every process's block."""
    return tuple(
        find_roots(blocks.of(process), blocks.logical_ranks) for process in range(blocks.processes)
    )
