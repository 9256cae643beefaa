"""Gradients of logical ranks, added in the order of the tree and averaged."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_d9m.errors import SettingError
from lightning_d9m.logical_ranks.blocks import Blocks
from lightning_d9m.logical_ranks.bucket_layout import Bucket, Slot, lay_out
from lightning_d9m.logical_ranks.exchange import PendingSum, RootExchange, add_wide
from lightning_d9m.logical_ranks.tree import Fold, Node

BUCKET_BYTES = 25 * 2**20  # as DDP
# The gradients of a node by the position of the parameter; one that is missing is +0.0.
_Gradients = list[Tensor | None]
_Values = list[tuple[Node, _Gradients]]


@dataclass(frozen=True)
class _Wire:
    """The roots of a bucket on their way.

    Attributes:
        bucket: The bucket, whose flat tensor receives the result.
        roots: One flat buffer for each root; the last may be the bucket's.
        has_gradient: Whether this process has a gradient, by slot.
        pending: The exchange.
    """

    bucket: Bucket
    roots: list[Tensor]
    has_gradient: list[bool]
    pending: PendingSum


class LogicalGradients:
    """The gradients of all logical ranks, summed along the tree.

    After each backward pass of this process except the last, `set_aside` takes the gradients away.
    After the last, `finish` leaves the average (or sum) over all logical ranks in
    ``parameter.grad``, the same bits on every process and for every number of processes. A missing
    gradient counts as +0.0, and stays None only if no logical rank has one.

    ``parameter.grad`` is then a view of a buffer that the next step overwrites. So begin each step
    with ``zero_grad(set_to_none=True)``.

    Args:
        named_parameters: All parameters in their order of registration. Which of them take part is
            decided in each step, by ``requires_grad``.
        blocks: The logical ranks of all processes.
        process: This process.
        group: The process group whose ranks are the processes; None is torch's default group.
        op: ``"average"`` divides the sum once by the number of logical ranks.
        bucket_bytes: Size at which a bucket is closed, in bytes; the first one at 1 MiB.
        sparse_as_dense: Sum sparse gradients as dense ones; otherwise they are an error.

    Raises:
        SettingError: A value is not allowed.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, Parameter]],
        blocks: Blocks,
        process: int,
        group: Any = None,
        *,
        op: Literal["average", "sum"] = "average",
        bucket_bytes: int = BUCKET_BYTES,
        sparse_as_dense: bool = False,
    ) -> None:
        if op not in {"average", "sum"}:
            raise SettingError(f"op={op!r} is not known: pass 'average' or 'sum'.")
        if type(bucket_bytes) is not int or bucket_bytes < 0:
            raise SettingError(
                f"bucket_bytes={bucket_bytes!r} is not allowed: pass a whole number, 0 or more."
            )
        self._block = blocks.of(process)
        self._exchange = RootExchange(blocks, process, group)
        self._divisor = blocks.logical_ranks if op == "average" else 1
        self._bucket_bytes = bucket_bytes
        self._sparse_as_dense = sparse_as_dense
        unique: dict[int, tuple[str, Parameter]] = {}
        for name, parameter in named_parameters:  # a shared parameter has one gradient
            unique.setdefault(id(parameter), (name, parameter))
        self._parameters = list(unique.values())
        self._trained: tuple[bool, ...] = ()
        self._buckets: list[Bucket] = []
        self._buffers: set[int] = set()
        # Buffers of a bucket's other roots, and of half types in float32.
        self._kept: dict[tuple[int, int], Tensor] = {}
        self._fold = self._begin()

    @property
    def bytes_sent(self) -> int:
        """The bytes that this process has sent so far."""
        return self._exchange.bytes_sent

    def set_aside(self, logical_rank: int) -> None:
        """Take the gradients of a logical rank away, which is not the last of this process.

        Raises:
            SettingError: Another logical rank is next, or a gradient is not allowed.
        """
        self._check_next(logical_rank, is_last=False)
        self._take(logical_rank)

    def finish(self, logical_rank: int) -> None:
        """Take the gradients of the last logical rank; set ``grad`` to the sum over all of them.

        Raises:
            SettingError: Another logical rank is next, or a gradient is not allowed.
        """
        self._check_next(logical_rank, is_last=True)
        self._take(logical_rank)
        values, self._fold = self._fold.held, self._begin()
        with torch.no_grad():
            wires = [self._send(bucket, values) for bucket in self._buckets]
            values.clear()
            for wire in wires:
                wire.pending.finish()
                self._return(wire)

    def discard(self) -> None:
        """Forget what was set aside in this step."""
        self._fold = self._begin()
        for _, parameter in self._parameters:
            parameter.grad = None

    def _begin(self) -> Fold[_Gradients]:
        self._next = self._block.start
        return Fold(self._exchange.blocks.logical_ranks, add_gradients)

    def _check_next(self, logical_rank: int, *, is_last: bool) -> None:
        first, last = self._block.start, self._block.stop - 1
        if logical_rank == self._next and is_last == (logical_rank == last):
            return
        calls = f"finish({last})"
        if first < last:
            calls = f"set_aside({first}) to set_aside({last - 1}), then {calls}"
        raise SettingError(
            f"The gradients of logical rank {logical_rank} came in, but {self._next} is next: call "
            f"{calls}, once per step and in this order. After an exception, call discard()."
        )

    @torch.no_grad()
    def _take(self, logical_rank: int) -> None:
        if logical_rank == self._block.start:
            self._lay_out()
        taken: _Gradients = []
        storages: set[int] = set()
        for name, parameter in self._parameters:
            gradient = parameter.grad
            if gradient is not None:
                gradient = self._make_dense(name, gradient)
                storage = gradient.untyped_storage().data_ptr()
                if storage in self._buffers and gradient.numel():
                    raise SettingError(
                        f"The gradient of {name!r} was added to that of the last step: begin each "
                        "step with zero_grad(set_to_none=True)."
                    )
                # Autograd lets two parameters share the memory of one gradient, as for
                # a.view(-1) + b.view(-1). A fold in place would change both.
                if storage in storages:
                    gradient = gradient.clone()
                storages.add(storage)
                gradient = _as_real(gradient)
                parameter.grad = None
            taken.append(gradient)
        self._fold.push(Node(logical_rank, logical_rank + 1), taken)
        self._next += 1

    def _make_dense(self, name: str, gradient: Tensor) -> Tensor:
        if gradient.layout == torch.strided:
            return gradient.detach()
        if not self._sparse_as_dense:
            raise SettingError(
                f"The gradient of {name!r} is sparse ({gradient.layout}), and sums over logical "
                "ranks are dense: pass sparse_as_dense=True to sum it as a dense tensor, or build "
                "the embedding with sparse=False."
            )
        # coalesce() adds duplicates in sorted order; to_dense() alone adds them in any order.
        return gradient.coalesce().to_dense()

    def _lay_out(self) -> None:
        """Lay out the buckets of the parameters that are trained now, unless they are the same."""
        trained = tuple(parameter.requires_grad for _, parameter in self._parameters)
        if trained == self._trained:
            return
        self._trained = trained
        self._kept = {}
        self._positions = {id(parameter): i for i, (_, parameter) in enumerate(self._parameters)}
        pairs = [pair for pair in self._parameters if pair[1].requires_grad]
        self._buckets = lay_out(pairs, self._bucket_bytes, with_flags=True)
        self._buffers = {bucket.flat.untyped_storage().data_ptr() for bucket in self._buckets}

    def _send(self, bucket: Bucket, values: _Values) -> _Wire:
        """Pack a bucket's part of each root, and start the exchange."""
        positions = [self._positions[id(slot.parameter)] for slot in bucket.slots]
        has_gradient = [any(v[position] is not None for _, v in values) for position in positions]
        result = _as_real(bucket.flat).view(-1)
        roots = []
        for number, (_, gradients) in enumerate(values):
            is_last = number == len(values) - 1
            root = self._pick_buffer(bucket, number, is_last=is_last)
            _pack(bucket, root, [gradients[position] for position in positions])
            for position in positions:
                gradients[position] = None  # the memory is free for the next bucket
            roots.append(_as_real(root).view(-1))
        pending = self._exchange.start(roots, result, self._divisor)
        return _Wire(bucket, roots, has_gradient, pending)

    def _pick_buffer(self, bucket: Bucket, number: int, *, is_last: bool) -> Tensor:
        """Return the memory of a root: the last one's is that of the result where types agree."""
        flat = bucket.flat
        is_wide = flat.element_size() >= 4 or self._exchange.sends_leaves  # noqa: PLR2004
        if is_last and is_wide:
            return flat
        key = (bucket.index, number)
        if key not in self._kept:
            dtype = flat.dtype if is_wide else torch.float32
            self._kept[key] = torch.zeros_like(flat, dtype=dtype)
        return self._kept[key]

    def _return(self, wire: _Wire) -> None:
        """Set the gradients to views of the result."""
        present = wire.has_gradient
        if not all(present):
            # Another process may have a gradient: the flags were summed with the gradients.
            present = (wire.bucket.flags.real > 0).tolist()
        for slot, is_present in zip(wire.bucket.slots, present, strict=True):
            slot.parameter.grad = slot.view if is_present else None


def add_gradients(left: _Gradients, right: _Gradients) -> _Gradients:
    """Add the gradients of two nodes, in place where they are float32 or wider."""
    total: _Gradients = []
    pairs: list[tuple[Tensor, Tensor]] = []
    for one, other in zip(left, right, strict=True):
        if one is not None and other is not None:
            if one.dtype == other.dtype and one.element_size() >= 4:  # noqa: PLR2004
                pairs.append((one, other))
                total.append(one)
            else:
                total.append(add_wide(one, other))
        else:
            present = other if one is None else one
            # A zero is added, because it turns -0.0 into +0.0.
            total.append(None if present is None else present.add_(0.0))
    if pairs:
        torch._foreach_add_(*map(list, zip(*pairs, strict=True)))
    return total


def _pack(bucket: Bucket, root: Tensor, gradients: Sequence[Tensor | None]) -> None:
    """Copy gradients to their places in a root, with zeros and flags for those that miss."""
    flags = root[bucket.slots[-1].stop :]
    flags.fill_(1.0)
    targets, sources = [], []
    for number, (slot, gradient) in enumerate(zip(bucket.slots, gradients, strict=True)):
        if gradient is None:
            root[slot.start : slot.stop].zero_()
            flags[number] = 0.0
        else:
            targets.append(_as_real(_view_slot(root, slot)))
            sources.append(gradient)
    if targets:
        torch._foreach_copy_(targets, sources)


def _view_slot(root: Tensor, slot: Slot) -> Tensor:
    return root.as_strided(slot.view.shape, slot.view.stride(), root.storage_offset() + slot.start)


def _as_real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
