"""The gradients of a process's logical ranks, added along the tree as they come in."""

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from lightning_d9m.errors import SettingError
from lightning_d9m.logical_ranks.tree import Blocks, Fold, Node

_HALVES = frozenset({torch.float16, torch.bfloat16})
_CHUNK = 2**17  # elements; several such chunks fit in the second cache of a core
# The gradients of a node, by part: a large gradient, or the small ones of a bucket. None is a
# missing one, which counts as +0.0.
Gradients = list[Tensor | None]


class GradientFold:
    """The sums of the subtrees of one process's block.

    The gradients of the next logical rank come in one by one (`fold_one`), in any order; `push`
    ends the logical rank. Tensors that are held are changed in place, so they must not share
    memory.

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
    def is_first(self) -> bool:
        """True if the next logical rank is the first of a step."""
        return self.next == self._block.start

    @property
    def merges(self) -> int:
        """The number of held nodes to which the next logical rank is added."""
        return self._merges[self.next - self._block.start]

    def fold_one(
        self,
        index: int,
        gradient: Tensor | None,
        out: Tensor | None = None,
        end: Callable[[Tensor], None] | None = None,
    ) -> Tensor | None:
        """Add one gradient of the next logical rank to the nodes that it completes.

        Args:
            index: The part.
            gradient: Its gradient. It is not changed unless others lack theirs.
            out: Where the result may be written; it is used if the dtype agrees.
            end: Called with parts of the result to change them. The result is then in ``out``, or
                without it in memory of this fold or, if it completes no node, in ``gradient``.
        """
        lefts: Gradients = []
        for level in range(1, self.merges + 1):
            held = self.held[-level]
            lefts.append(held[index])
            held[index] = None
        is_owned = bool(lefts) or out is not None
        if is_owned and (end or len(lefts) > 1) and _are_alike([*lefts, gradient, out]):
            return add_in_chunks(lefts, gradient, out, end)
        value = gradient
        for left in lefts:
            value = add_pair(left, value, out if left is lefts[-1] else None)
        if end is not None and value is not None:
            value = value if out is None or value is out else out.copy_(value)
            end(value)
        return value

    def take_roots(
        self,
        index: int,
        gradient: Tensor | None,
        out: Tensor | None = None,
        end: Callable[[Tensor], None] | None = None,
    ) -> Gradients:
        """Take one part of each root of this process, given its gradient of the last logical rank.

        ``out`` and ``end`` are of the last root, as in `fold_one`.
        """
        values: Gradients = []
        for held in self.held[: len(self.held) - self.merges]:
            values.append(held[index])
            held[index] = None
        return [*values, self.fold_one(index, gradient, out, end)]

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


def _are_alike(tensors: Gradients) -> bool:
    """Return whether sums can be taken in chunks; the last tensor may be None."""
    *inputs, out = tensors
    first = inputs[-1]
    if first is None or is_half(first) or (out is None and not first.is_contiguous()):
        return False
    return all(
        each is not None and each.dtype == first.dtype and each.stride() == first.stride()
        for each in (*inputs, first if out is None else out)
    )


def add_in_chunks(
    lefts: Any, right: Any, out: Tensor | None, end: Callable[[Tensor], None] | None
) -> Tensor:
    """Add tensors of the same layout, in chunks that stay in the cache from one sum to the next.

    Args:
        lefts: What is added to the left of the sum so far, one after the other. They are scratch.
        right: The first right operand, which is not changed.
        out: The result; without it, that is the last of ``lefts``.
        end: Called with each chunk of the result.
    """
    total: Tensor = lefts[-1] if out is None else out
    targets = [*lefts[:-1], total] if lefts else [total]
    for parts in zip(*map(split_in_chunks, (right, *lefts, *targets)), strict=True):
        value = parts[0]
        for left, target in zip(parts[1 : 1 + len(lefts)], parts[1 + len(lefts) :], strict=False):
            value = torch.add(left, value, out=target)
        if not lefts:
            parts[-1].copy_(value)
        if end is not None:
            end(parts[-1])
    return total


def split_in_chunks(tensor: Tensor) -> Sequence[Tensor]:
    """Return parts that fit in a cache of the processor, in the order of memory."""
    flat = tensor.as_strided((tensor.numel(),), (1,))
    parts: tuple[Tensor, ...] = flat.split(_CHUNK) if tensor.device.type == "cpu" else (flat,)
    return parts


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
        if gradient is not None and gradient.layout is torch.strided:
            storage = gradient.untyped_storage().data_ptr()
            if storage in storages:
                gradients[index] = gradient.clone()
            storages.add(storage)


def make_dense(name: str, gradient: Tensor, *, allowed: bool) -> Tensor:
    """Return a gradient as a dense tensor.

    Raises:
        SettingError: It is sparse, and that is not allowed.
    """
    if gradient.layout is torch.strided:
        return gradient
    if not allowed:
        raise SettingError(
            f"The gradient of {name!r} is sparse ({gradient.layout}), and gradients are summed as "
            "dense tensors: pass sparse_as_dense=True, or build the embedding with sparse=False."
        )
    # coalesce() adds duplicates in sorted order; to_dense() alone adds them in any order.
    return gradient.coalesce().to_dense()


def refuse_stale(name: str) -> NoReturn:
    """Raise an error about a gradient that is still that of the last step."""
    raise SettingError(
        f"The gradient of {name!r} was added to that of the last step: begin each step with "
        "zero_grad(set_to_none=True)."
    )
