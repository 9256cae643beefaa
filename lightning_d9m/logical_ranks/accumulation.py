"""The gradients of a process's logical ranks, added along the tree as they come in."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_d9m.logical_ranks.blocks import Blocks
from lightning_d9m.logical_ranks.tree import Fold, Node

_HALVES = frozenset({torch.float16, torch.bfloat16})
# The gradients of a node, by parameter; None is a missing one, which counts as +0.0.
Gradients = list[Tensor | None]


class GradientFold:
    """The sums of the subtrees of one process's block.

    The gradients of the next logical rank come in one by one (`fold_one`) or many at once
    (`fold_many`), in any order; `push` ends the logical rank. Tensors that are held are changed in
    place, so they must not share memory.

    Args:
        blocks: The logical ranks of all processes.
        process: This process.

    Attributes:
        held: The gradients of the nodes that are complete, in order.
    """

    def __init__(self, blocks: Blocks, process: int) -> None:
        self._block = blocks.of(process)
        self._merges = count_merges(self._block, blocks.logical_ranks)
        self.held: list[Gradients] = []
        self.clear()

    def clear(self) -> None:
        """Forget what is held; the first logical rank of the block is next."""
        self.held.clear()
        self.next = self._block.start

    @property
    def merges(self) -> int:
        """The number of held nodes to which the next logical rank is added."""
        return self._merges[self.next - self._block.start]

    def fold_one(
        self, index: int, gradient: Tensor | None, out: Tensor | None = None
    ) -> Tensor | None:
        """Add one gradient of the next logical rank to the nodes that it completes.

        Args:
            index: The parameter.
            gradient: Its gradient. It is not changed unless others lack theirs.
            out: Where the result may be written; it is used if the dtype agrees.
        """
        value = gradient
        merges = self.merges
        for level in range(1, merges + 1):
            lefts = self.held[-level]
            left, lefts[index] = lefts[index], None
            value = add_pair(left, value, out if level == merges else None)
        return value

    def fold_many(self, indices: Sequence[int], gradients: Gradients) -> Gradients:
        """Add gradients of several parameters to the nodes that they complete."""
        values = gradients
        for level in range(1, self.merges + 1):
            lefts = self.held[-level]
            values = add_gradients([lefts[index] for index in indices], values)
            for index in indices:
                lefts[index] = None
        return values

    def push(self, values: Gradients) -> None:
        """Hold the folded gradients of the next logical rank."""
        del self.held[len(self.held) - self.merges :]
        self.held.append(values)
        self.next += 1


def count_merges(block: range, leaves: int) -> list[int]:
    """Return, for each leaf of a block, the number of held nodes to which it is added."""
    merges = []
    fold = Fold[None](leaves, lambda _left, _right: None)
    for leaf in block:
        before = len(fold.held)
        fold.push(Node(leaf, leaf + 1), None)
        merges.append(before + 1 - len(fold.held))
    return merges


def add_gradients(left: Gradients, right: Gradients) -> Gradients:
    """Add the gradients of two nodes, in place where they are float32 or wider."""
    total: Gradients = []
    lefts: list[Tensor] = []
    rights: list[Tensor] = []
    for one, other in zip(left, right, strict=True):
        if one is None or other is None or is_half(one) or is_half(other):
            total.append(add_pair(one, other))
        else:
            lefts.append(one)
            rights.append(other)
            total.append(one)
    if lefts:
        torch._foreach_add_(lefts, rights)
    return total


def add_pair(left: Tensor | None, right: Tensor | None, out: Tensor | None = None) -> Tensor | None:
    """Add two gradients, either of which may be missing."""
    if left is not None and right is not None:
        return add_wide(left, right, out)
    # The zero is added, because it turns -0.0 into +0.0. A right gradient may share its memory.
    if left is not None:
        return left.add_(0.0)
    return None if right is None else right.add(0.0)


def add_wide(left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
    """Return ``left + right`` in float32 or wider, in ``out`` if it has that dtype.

    Without ``out`` the left tensor, a right one that is wider, or a new one is the result.
    """
    if is_half(left):
        if is_half(right):
            return left.float().add_(right)
        return torch.add(left, right, out=right)
    if out is None or out.dtype != left.dtype:
        return left.add_(right)
    return torch.add(left, right, out=out)


def is_half(tensor: Tensor) -> bool:
    """Return whether sums of this dtype are taken in float32."""
    return tensor.dtype in _HALVES


def as_real(tensor: Tensor) -> Tensor:
    """Return the real and imaginary parts of complex numbers, and other tensors unchanged."""
    if tensor.dtype.is_complex:
        return torch.view_as_real(tensor.resolve_conj())
    return tensor


def separate(gradients: Gradients) -> None:
    """Copy gradients that share memory, so that each can be changed in place.

    Autograd lets two parameters share the memory of one gradient, as for ``a.view(-1) +
    b.view(-1)``.
    """
    storages: set[int] = set()
    for index, gradient in enumerate(gradients):
        if gradient is not None:
            storage = gradient.untyped_storage().data_ptr()
            if storage in storages:
                gradients[index] = gradient.clone()
            storages.add(storage)
