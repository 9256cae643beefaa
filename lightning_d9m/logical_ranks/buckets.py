"""Buckets of gradients: laid out by the parameters alone, packed, exchanged and returned.

The order, size, dtype and device of the parameters decide the place of each gradient.
"""

from collections.abc import Iterable, Sequence
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
from lightning_d9m.logical_ranks.accumulation import (
    Part,
    as_real,
    is_half,
    make_dense,
    refuse_stale,
)
from lightning_d9m.logical_ranks.exchange import PendingSum, RootExchange, end_sum, round_up

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
        sparse_as_dense: Whether sparse gradients are summed as dense ones.
        adds: Whether a gradient may be that of the last step, to which autograd has added.
        sent_as: The dtype to which gradients of float32 and float64 are rounded before they are
            sent; None rounds none.
    """

    divisor: int
    sparse_as_dense: bool = False
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
        is_missing: Whether the next logical rank has no gradient, if it is large.
    """

    bucket: "Bucket"
    position: int
    name: str
    parameter: Parameter
    start: int
    view: Tensor
    part: Part | None
    is_missing: bool = False

    def describe(self) -> str:
        """Return the name and layout, which must be the same on every process."""
        return f"{self.name} {tuple(self.view.shape)} {self.view.dtype} {self.start}"

    def take(self, options: SumOptions) -> Tensor | None:
        """Take the gradient of the parameter away, as a dense tensor.

        Raises:
            SettingError: It is sparse, or that of the last step, and that is not allowed.
        """
        gradient = self.parameter.grad
        self.is_missing = gradient is None
        if gradient is None:
            return None
        gradient = make_dense(self.name, gradient, allowed=options.sparse_as_dense)
        if not options.adds and gradient.data_ptr() == self.view.data_ptr():
            refuse_stale(self.name)
        self.parameter.grad = None
        return as_real(gradient)


class Bucket:
    """A flat buffer with a slot for each gradient, and one more for each root of this process.

    Slots begin at multiples of 64 bytes, with zeros between. One flag per slot follows: it is 1 in
    each logical rank that has the gradient, so the sum of the flags tells whether any has it. The
    small gradients and the flags of a logical rank are packed, and then added as one part.

    The last root has the memory of the result, if their dtypes agree.

    Attributes:
        flat: The buffer, which receives the result.
        slots: One slot per parameter, those of large ones first.
        large: The slots of large parameters.
        fired: Positions of the slots whose gradients have arrived.
        is_launched: Whether the exchange of this step has started.
        end: Ends the sum of each part while it is in the cache, in a single process.
    """

    def __init__(
        self, members: Sequence[Named], exchange: RootExchange, options: SumOptions
    ) -> None:
        members = sorted(members, key=lambda member: not _is_large(member[1]))
        first = members[0][1]
        step = max(1, ALIGNMENT_BYTES // first.element_size())
        starts = [
            *accumulate((round_up(each.numel(), step) for _, each in members), initial=0),
        ]
        self._exchange, self._options = exchange, options
        size = starts[-1] + len(members)
        self.flat = torch.zeros(size, dtype=first.dtype, device=first.device)
        self._make_roots()
        self.slots = [
            Slot(
                self,
                position,
                name,
                each,
                start,
                view_like(self.flat, start, each),
                Part([as_real(view_like(root, start, each)) for root in self._roots])
                if _is_large(each)
                else None,
            )
            for position, ((name, each), start) in enumerate(zip(members, starts, strict=False))
        ]
        self.large = [slot for slot in self.slots if slot.part is not None]
        self._small = self.slots[len(self.large) :]
        begin = starts[len(self.large)]
        self._part = Part([as_real(root[begin:]).view(-1) for root in self._roots])
        self._parameters = [slot.parameter for slot in self._small]
        # An empty gradient has no address.
        views = [slot.view for slot in self._small]
        self._addresses = [view.data_ptr() if view.numel() else -1 for view in views]
        self._reordered = [n for n, view in enumerate(views) if not view.is_contiguous()]
        # The pieces of the buffer from there: gradients, the zeros between them, and the flags.
        self._pieces: list[Tensor] = []
        self._places: list[int] = []
        for view in views:
            self._places.append(len(self._pieces))
            self._pieces.append(view)
            if gap := round_up(view.numel(), step) - view.numel():
                self._pieces.append(self.flat.new_zeros(gap))
        self._pieces.append(self.flat.new_ones(len(members)))
        self.fired: set[int] = set()
        self.is_launched = False
        # Positions of the gradients that all logical ranks so far lack, here.
        self._lacking: set[int] | None = None
        self._pending: PendingSum | None = None

    def _make_roots(self) -> None:
        exchange, flat, dtype = self._exchange, self.flat, self.flat.dtype
        is_rounded = self._options.sent_as is not None and dtype in (torch.float32, torch.float64)
        if is_rounded:
            dtype = cast("torch.dtype", self._options.sent_as)
        if is_half(flat) and not exchange.sends_leaves:
            dtype = torch.float32
        count = len(exchange.roots[exchange.process])
        self._roots = [torch.zeros_like(flat, dtype=dtype) for _ in range(count)]
        if dtype is flat.dtype:
            self._roots[-1] = flat
        self._result = self._roots[-1] if is_rounded else flat
        self._is_alone = exchange.blocks.processes == 1 and self._roots[-1] is flat
        self.end = partial(end_sum, divisor=self._options.divisor) if self._is_alone else None

    @property
    def is_complete(self) -> bool:
        """Whether every gradient has arrived."""
        return len(self.fired) == len(self.slots)

    def set_small_aside(self, merges: int, *, is_first: bool) -> None:
        """Take the small gradients of the next logical rank, which is not the last one here."""
        self._part.set_aside(self._take_small(is_first=is_first), merges)

    def pack_small(self, merges: int, *, is_first: bool) -> None:
        """Pack the small gradients' part of each root."""
        self._part.pack(self._take_small(is_first=is_first), merges, self.end)

    def _take_small(self, *, is_first: bool) -> Tensor:
        """Take the small gradients away, and return them and the flags in a new buffer.

        ``is_first`` says whether they are the first of a step.
        """
        missing = {slot.position for slot in self.large if slot.is_missing}
        found: list[Any] = [parameter.grad for parameter in self._parameters]
        if not {None if each is None else each.layout for each in found} <= {torch.strided}:
            allowed = self._options.sparse_as_dense
            for place, slot in enumerate(self._small):
                if found[place] is None:
                    missing.add(slot.position)
                    found[place] = torch.zeros_like(slot.view)
                found[place] = make_dense(slot.name, found[place], allowed=allowed)
        if is_first and not self._options.adds:
            stale = [*map(eq, [each.data_ptr() for each in found], self._addresses)]
            if True in stale:
                refuse_stale(self._small[stale.index(True)].name)
        for place in self._reordered:
            found[place] = _put_in_order(found[place], self._small[place].view)
        pieces = [*self._pieces]
        for parameter, place, gradient in zip(self._parameters, self._places, found, strict=True):
            parameter.grad = None
            pieces[place] = gradient
        if missing:
            pieces[-1] = flags = pieces[-1].clone()
            for position in missing:  # the copy of a list to the device would wait
                flags[position].zero_()
        self._lacking = missing if self._lacking is None else self._lacking & missing
        return as_real(_flatten_dense_tensors(pieces)).view(-1)

    def start(self) -> None:
        """Start the exchange of the packed roots."""
        self.is_launched = True
        if not self._is_alone:
            roots = [as_real(root).view(-1) for root in self._roots]
            result = as_real(self._result).view(-1)
            self._pending = self._exchange.start(roots, result, self._options.divisor)

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
            if slot.position not in (self._lacking or ()):
                slot.parameter.grad = slot.view
            if slot.part is not None:
                slot.part.is_taken = False
        self.fired.clear()
        self.is_launched = False

    def take_lacking(self) -> list[tuple[Slot, Tensor]]:
        """Return the slot and flag of each gradient that all logical ranks of here lack."""
        lacking, self._lacking = self._lacking or (), None
        flags = self.flat[len(self.flat) - len(self.slots) :].real
        return [(self.slots[position], flags[position]) for position in lacking]


def settle_missing(buckets: Iterable[Bucket], processes: int) -> None:
    """Set the gradients that only other processes have, when all sums have ended.

    What no logical rank has stays as it is. One process knows that. Several wait for the flags of
    the sums, once for all buckets.
    """
    lacking = [pair for each in buckets for pair in each.take_lacking()]
    if processes == 1 or not lacking:
        return
    device = lacking[0][1].device
    flags = torch.stack([flag.to(device, torch.float32) for _, flag in lacking]).tolist()
    for (slot, _), ranks in zip(lacking, flags, strict=True):
        if ranks:
            slot.parameter.grad = slot.view


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


def _put_in_order(gradient: Tensor, view: Tensor) -> Tensor:
    """Return the elements of a gradient in the order in which a view has them in memory."""
    if gradient.stride() != view.stride():
        gradient = torch.empty_like(view).copy_(gradient)
    return gradient.as_strided((gradient.numel(),), (1,))


def check_options(*, op: str, bucket_bytes: int, compression: str | None = None) -> None:
    """Check the arguments of a sum of gradients.

    Raises:
        SettingError: A value is not allowed.
    """
    if op not in {"average", "sum"}:
        raise SettingError(f"op={op!r} is not known: pass 'average' or 'sum'.")
    if type(bucket_bytes) is not int or bucket_bytes < 0:
        raise SettingError(
            f"bucket_bytes={bucket_bytes!r} is not allowed: pass a whole number, 0 or more."
        )
    if compression not in {None, "fp16", "bf16"}:
        raise SettingError(
            f"compression={compression!r} is not known: pass 'fp16', 'bf16' or None."
        )


def refuse_second_gradient(name: str) -> NoReturn:
    """Raise an error about a gradient that came after the sum had taken the first one."""
    raise SettingError(
        f"The parameter {name!r} got a second gradient in one backward pass, after its first was "
        "added to the sum. Reentrant activation checkpointing of a shared parameter does that: "
        "pass use_reentrant=False to torch.utils.checkpoint."
    )


def refuse_removed(name: str) -> NoReturn:
    """Raise an error about a gradient that another hook has taken away."""
    raise SettingError(
        f"The gradient of {name!r} was removed before the ranks could reduce it. An "
        "optimizer that steps inside a backward hook works on one rank only: let Lightning "
        "step it."
    )
