"""The gradients of a process's logical ranks, added along the tree as they come in."""

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

# Sums of these are taken in float32 and rounded once: folded in bfloat16, half of the sums of eight
# logical ranks are not correctly rounded.
_HALVES = frozenset({torch.float16, torch.bfloat16})
Gradients = list[Tensor | None]
"""Gradients, or sums of them; None is a missing one, which counts as +0.0."""


class Summand(ABC):
    """A large gradient, or the small ones of a bucket, which are added at once.

    It holds the sums of the subtrees whose gradients have come in, one after the other. They are
    changed in place, so parts must not share memory.

    Args:
        views: Where each root of this process is packed.

    Attributes:
        is_taken: Whether the gradient of the next logical rank has been added.
    """

    def __init__(self, views: list[Tensor]) -> None:
        self.is_taken = False
        self._views = views
        self._held: Gradients = []

    @abstractmethod
    def take(self) -> Tensor | None:
        """Take the gradient of the next logical rank away, as a dense tensor."""

    def set_aside(self, merges: int, storages: set[int] | None = None) -> None:
        """Add the gradient of a logical rank that is not the last one to sums that are held.

        One that is held itself is copied if others have its memory, see `separate`.
        """
        gradient = self.take()
        # A gradient with merges is a right operand, which no addition changes. Only one that is
        # held becomes a left operand later, which is added to in place.
        if storages is not None and not merges:
            gradient = separate(gradient, storages)
        self._held.append(merge(self._held, gradient, merges))
        self.is_taken = True

    def pack(self, merges: int) -> None:
        """Add the gradient of the last logical rank, and write the roots to their places."""
        last = merge(self._held, self.take(), merges, self._views[-1])
        for view, value in zip(self._views, [*self._held, last], strict=True):
            # The place is sent in any case, so that all processes send equally much; a missing
            # gradient counts as +0.0.
            if value is None:
                view.zero_()
            elif value is not view:
                view.copy_(value)
        self._held.clear()
        self.is_taken = True


def merge(held: Gradients, total: Tensor | None, merges: int, out: Tensor | None = None) -> Any:
    """Return the sum of a gradient and the last held sums, which are removed, see `count_merges`.

    The gradient is not changed unless others lack theirs. The result is written to ``out`` if
    their dtypes agree.
    """
    for left in range(merges, 0, -1):
        total = add_pair(held.pop(), total, out if left == 1 else None)
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
        # A node of one logical rank has a half type where the other has been added to already. The
        # wide one is scratch: it is a sum, and never a gradient.
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


def separate(gradient: Tensor | None, storages: set[int]) -> Tensor | None:
    """Return a gradient, or a copy if its memory is among these, so that it can be changed.

    Autograd lets two parameters share the memory of one gradient, as for ``a.view(-1) +
    b.view(-1)``.
    """
    if gradient is None or gradient.layout is not torch.strided:
        return gradient
    # Addresses of storages, not of tensors: two views of one storage may begin at different places
    # and still overlap.
    storage = gradient.untyped_storage().data_ptr()
    if storage in storages:
        return gradient.clone()
    storages.add(storage)
    return gradient
