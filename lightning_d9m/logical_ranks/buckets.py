"""Buckets of gradients: laid out by the parameters alone, packed, exchanged and returned.

The order, size, dtype and device of the parameters decide the place of each gradient.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from operator import eq
from typing import Any, NoReturn, cast

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors
from torch.nn import Parameter

from lightning_d9m.errors import SettingError
from lightning_d9m.logical_ranks.accumulation import Part, as_real, is_half
from lightning_d9m.logical_ranks.exchange import LocalSum, RootExchange, end_sum, round_up

# Vectorized reductions (the norm of a gradient that is clipped) add in a different order at an
# address that is not aligned like a separate allocation.
ALIGNMENT_BYTES = 64
# A gradient of at least this size is packed as soon as it arrives: it is still in the cache, and
# the next gradient reuses its memory. Smaller ones are packed in one call, which costs less, and so
# they follow the large ones in their bucket.
_LARGE_BYTES = 2**16
# The first bucket is small, as in DDP, so that the first reduction starts early.
_FIRST_BYTES = 2**20

Named = tuple[str, Parameter]


@dataclass(frozen=True)
class SumOptions:
    """The rules of a sum of gradients, as `LogicalGradients` takes them.

    Attributes:
        divisor: Divides the sum, once.
        adds: Whether a gradient may be that of the last step, to which autograd has added.
        sent_as: The dtype to which gradients of float32 and float64 are rounded before they are
            sent; None rounds none.
    """

    divisor: int
    adds: bool = False
    sent_as: torch.dtype | None = None


@dataclass(slots=True, eq=False)
class Slot:
    """One parameter's place in a bucket.

    Attributes:
        bucket: The bucket.
        position: The number of the slot there.
        name: The name of the parameter.
        parameter: The parameter.
        start: Where the slot begins in the buffer.
        view: The gradient in the buffer.
        part: What adds the gradient, if it is large.
    """

    bucket: "Bucket"
    position: int
    name: str
    parameter: Parameter
    start: int
    view: Tensor
    part: Part | None = None

    def describe(self) -> str:
        """Return the name and layout, which must be the same on every process."""
        return f"{self.name} {tuple(self.view.shape)} {self.view.dtype} {self.start}"

    def refuse_stale(self) -> NoReturn:
        """Raise an error about a gradient that is still that of the last step."""
        raise SettingError(
            f"The gradient of {self.name!r} was added to that of the last step: begin each step "
            "with zero_grad(set_to_none=True)."
        )


class _LargePart(Part):
    """A gradient that is added as soon as it arrives."""

    def __init__(self, slot: Slot) -> None:
        bucket, parameter = slot.bucket, slot.parameter
        roots = [view_like(root, slot.start, parameter) for root in bucket.roots]
        super().__init__([as_real(root) for root in roots], bucket.end)
        self._slot = slot

    def take(self) -> Tensor | None:
        slot, parameter = self._slot, self._slot.parameter
        if parameter.grad is None:
            slot.bucket.missing.add(slot.position)
            return None
        gradient = _make_dense(parameter.grad)
        if not slot.bucket.options.adds and gradient.data_ptr() == slot.view.data_ptr():
            slot.refuse_stale()
        parameter.grad = None
        return as_real(gradient)


class _SmallPart(Part):
    """The small gradients of a bucket and the flags of all, packed in one call after the large."""

    def __init__(self, bucket: "Bucket", slots: Sequence[Slot], start: int, step: int) -> None:
        super().__init__([as_real(root[start:]).view(-1) for root in bucket.roots], bucket.end)
        self._bucket, self._slots = bucket, slots
        # An empty gradient has no address.
        views = [slot.view for slot in slots]
        self._addresses = [view.data_ptr() if view.numel() else -1 for view in views]
        self._reordered = [n for n, view in enumerate(views) if not view.is_contiguous()]
        # The pieces of the buffer from there: gradients, the zeros between them, and the flags.
        self._pieces: list[Tensor] = []
        self._places: list[int] = []
        for view in views:
            self._places.append(len(self._pieces))
            self._pieces.append(view)
            if gap := round_up(view.numel(), step) - view.numel():
                self._pieces.append(bucket.flat.new_zeros(gap))
        self._pieces.append(bucket.flat.new_ones(len(bucket.slots)))

    def take(self) -> Tensor:
        bucket, slots = self._bucket, self._slots
        missing, bucket.missing = bucket.missing, set()
        found: list[Any] = [slot.parameter.grad for slot in slots]
        if not {None if each is None else each.layout for each in found} <= {torch.strided}:
            for place, slot in enumerate(slots):
                if found[place] is None:
                    missing.add(slot.position)
                    found[place] = torch.zeros_like(slot.view)
                found[place] = _make_dense(found[place])
        if bucket.lacking is None and not bucket.options.adds:  # the first ones of a step
            stale = [*map(eq, [each.data_ptr() for each in found], self._addresses)]
            if True in stale:
                slots[stale.index(True)].refuse_stale()
        for place in self._reordered:
            found[place] = _put_in_order(found[place], slots[place].view)
        pieces = [*self._pieces]
        for slot, place, gradient in zip(slots, self._places, found, strict=True):
            slot.parameter.grad = None
            pieces[place] = gradient
        if missing:
            pieces[-1] = flags = pieces[-1].clone()
            for position in missing:  # the copy of a list to the device would wait
                flags[position].zero_()
        bucket.lacking = missing if bucket.lacking is None else bucket.lacking & missing
        return as_real(_flatten_dense_tensors(pieces)).view(-1)


class Bucket:
    """A flat buffer with a slot for each gradient, and one more for each root of this process.

    Slots begin at multiples of 64 bytes, with zeros between. One flag per slot follows: it is 1 in
    each logical rank that has the gradient, so the sum of the flags tells whether any has it.

    The last root has the memory of the result, if their dtypes agree.

    Attributes:
        flat: The buffer, which receives the result.
        roots: The buffers of the roots.
        options: The rules of the sum.
        end: Ends the sum of each part while it is in the cache, in a single process.
        slots: One slot per parameter, those of large ones first.
        parts: What adds the gradients: one for each large one, and one for all else.
        fired: Positions of the slots whose gradients have arrived.
        missing: Positions of the large gradients that the next logical rank lacks.
        lacking: Positions of the gradients that all logical ranks of this process have lacked so
            far; None before the first.
        is_launched: Whether the exchange of this step has started.
    """

    def __init__(
        self, members: Sequence[Named], exchange: RootExchange, options: SumOptions
    ) -> None:
        members = sorted(members, key=lambda member: not _is_large(member[1]))
        first = members[0][1]
        step = max(1, ALIGNMENT_BYTES // first.element_size())
        sizes = (round_up(each.numel(), step) for _, each in members)
        starts = [*accumulate(sizes, initial=0)]
        self.options = options
        self._exchange = exchange
        size = starts[-1] + len(members)
        self.flat = torch.zeros(size, dtype=first.dtype, device=first.device)
        self._make_roots()
        self.slots = [
            Slot(self, position, name, each, start, view_like(self.flat, start, each))
            for position, ((name, each), start) in enumerate(zip(members, starts, strict=False))
        ]
        self.parts: list[Part] = []
        for slot in self.slots:
            if _is_large(slot.parameter):
                slot.part = _LargePart(slot)
                self.parts.append(slot.part)
        count = len(self.parts)
        self.parts.append(_SmallPart(self, self.slots[count:], starts[count], step))
        self.fired: set[int] = set()
        self.missing: set[int] = set()
        self.lacking: set[int] | None = None
        self.is_launched = False
        self._pending: LocalSum | None = None

    def _make_roots(self) -> None:
        exchange, flat, dtype = self._exchange, self.flat, self.flat.dtype
        is_rounded = self.options.sent_as is not None and dtype in (torch.float32, torch.float64)
        if is_rounded:
            dtype = cast("torch.dtype", self.options.sent_as)
        if is_half(flat) and not exchange.sends_leaves:
            dtype = torch.float32
        count = len(exchange.roots[exchange.process])
        self.roots = [torch.zeros_like(flat, dtype=dtype) for _ in range(count)]
        if dtype is flat.dtype:
            self.roots[-1] = flat
        self._result = self.roots[-1] if is_rounded else flat
        self._is_alone = exchange.blocks.processes == 1 and self.roots[-1] is flat
        self.end = partial(end_sum, divisor=self.options.divisor) if self._is_alone else None

    def start(self) -> None:
        """Start the exchange of the packed roots."""
        self.is_launched = True
        if not self._is_alone:
            roots = [as_real(root).view(-1) for root in self.roots]
            result = as_real(self._result).view(-1)
            self._pending = self._exchange.start(roots, result, self.options.divisor)

    def fold(self) -> None:
        """Sum what other processes wait for."""
        if self._pending is not None:
            self._pending.fold()

    def finish(self) -> None:
        """Wait for the result, and set the gradients to views of it, but not those that lack."""
        if self._pending is not None:
            self._pending.finish()
            self._pending = None
        if self._result is not self.flat:
            self.flat.copy_(self._result)
        for slot in self.slots:
            if slot.position not in (self.lacking or ()):
                slot.parameter.grad = slot.view
        for part in self.parts:
            part.is_taken = False
        self.fired.clear()
        self.is_launched = False

    def take_lacking(self) -> list[tuple[Slot, Tensor]]:
        """Return the slot and flag of each gradient that all logical ranks of here lack."""
        lacking, self.lacking = self.lacking or (), None
        flags = self.flat[len(self.flat) - len(self.slots) :].real
        return [(self.slots[position], flags[position]) for position in lacking]


def lay_out(
    parameters: Sequence[Named], bucket_bytes: int, exchange: RootExchange, options: SumOptions
) -> list[Bucket]:
    """Lay out buckets in reverse order of registration, in which gradients tend to arrive.

    Args:
        parameters: Names and parameters in their order of registration.
        bucket_bytes: Size at which a bucket is closed, in bytes. The first bucket of each dtype and
            device is closed at 1 MiB. With 0, each parameter has its own bucket.
        exchange: Sums the roots.
        options: The rules of the sum.
    """
    chunks: list[list[tuple[int, Named]]] = []
    open_chunks: dict[tuple[torch.device, torch.dtype], tuple[list[tuple[int, Named]], int]] = {}
    for index, named in reversed([*enumerate(parameters)]):
        kind = named[1].device, named[1].dtype
        limit = bucket_bytes if kind in open_chunks else min(bucket_bytes, _FIRST_BYTES)
        chunk, left = open_chunks.get(kind, ([], 0))
        if not chunk or left <= 0:
            chunk, left = [], limit
            chunks.append(chunk)
        chunk.append((index, named))
        open_chunks[kind] = chunk, left - named[1].nbytes
    # Those come first whose last gradient tends to come first.
    chunks.sort(key=lambda chunk: -chunk[-1][0])
    return [Bucket([named for _, named in chunk], exchange, options) for chunk in chunks]


def view_like(flat: Tensor, start: int, parameter: Parameter) -> Tensor:
    """Return a view with the parameter's shape and, for channels_last, its strides."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    last = formats.get(parameter.dim())
    if last is not None and parameter.is_contiguous(memory_format=last):
        return flat.as_strided(parameter.shape, parameter.stride(), start)
    return flat[start : start + parameter.numel()].view(parameter.shape)


def _is_large(parameter: Parameter) -> bool:
    return parameter.nbytes >= _LARGE_BYTES


def _make_dense(gradient: Tensor) -> Tensor:
    if gradient.layout is torch.strided:
        return gradient
    # coalesce() adds duplicates in sorted order; to_dense() alone adds them in any order.
    return gradient.coalesce().to_dense()


def _put_in_order(gradient: Tensor, view: Tensor) -> Tensor:
    """Return the elements of a gradient in the order in which a view has them in memory."""
    if gradient.stride() != view.stride():
        gradient = torch.empty_like(view).copy_(gradient)
    return gradient.as_strided((gradient.numel(),), (1,))
