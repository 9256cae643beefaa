"""One fixed binary tree over logical ranks, which decides the order of every sum.

Floating-point addition is not associative, so the bits of a sum depend on how it is bracketed. Here
the number of logical ranks alone decides that. A node covers an aligned range of a power of two of
leaves, cut at the number of leaves; a node whose right child is empty is its left child. With 5
leaves the sum is ``((0 + 1) + (2 + 3)) + 4``.

A process adds the subtrees that lie inside its block. Their roots are all that is
needed to finish the sum, on any process, and in any order of arrival.
"""

from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

from lightning_d9m.logical_ranks.blocks import Blocks

T = TypeVar("T")


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
