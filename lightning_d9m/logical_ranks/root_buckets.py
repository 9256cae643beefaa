"""Buckets of gradients on their way: the roots of a process, packed, exchanged and returned."""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_d9m.logical_ranks.accumulation import GradientFold, as_real, is_half
from lightning_d9m.logical_ranks.bucket_layout import Bucket, Slot, SumOptions, lay_out
from lightning_d9m.logical_ranks.exchange import RootExchange, end_sum
from lightning_d9m.logical_ranks.small_gradients import SmallGradients
from lightning_d9m.logical_ranks.whole_gradients import WholeGradient, is_whole


class RootBucket:
    """A bucket, with one flat buffer for each root of this process.

    The last root has the memory of the result, if their dtypes agree. The flag of a slot is 1 in
    each logical rank that has the gradient, so the sum of the flags tells whether any has it. The
    small gradients and the flags of a logical rank are packed, and then added as one tensor.

    The flat tensor of the bucket receives the result. ``indices`` has the parameter of each
    slot, and ``part`` is the small gradients of the bucket, as the `GradientFold` counts them.

    Attributes:
        large: The slots before this position are packed one by one.
        indices: The parameter of each slot.
        fired: Positions of the slots whose gradients have arrived.
        packed: Positions of the slots that are packed.
    """

    def __init__(
        self,
        bucket: Bucket,
        exchange: RootExchange,
        options: SumOptions,
        indices: Sequence[int],
        part: int,
    ) -> None:
        self._bucket = bucket
        self._exchange = exchange
        self._divisor = options.divisor
        self._part = part
        self.indices = indices
        self.slots, self.large = bucket.slots, bucket.large
        self.fired: set[int] = set()
        self.packed: set[int] = set()
        self._small = SmallGradients(bucket, options)
        flat = bucket.flat
        count = len(exchange.roots[exchange.process])
        is_rounded = options.sent_as is not None and flat.dtype in (torch.float32, torch.float64)
        dtype = options.sent_as if is_rounded else flat.dtype
        if is_half(flat) and not exchange.sends_leaves:
            dtype = torch.float32
        self._roots = [torch.zeros_like(flat, dtype=dtype) for _ in range(count)]
        if dtype is flat.dtype:
            self._roots[-1] = flat
        self._result = self._roots[-1] if is_rounded else flat
        self._views = [list(_view_large_slots(root, bucket)) for root in self._roots]
        self._smalls = [as_real(root[self._small.start :]).view(-1) for root in self._roots]
        # One process divides each gradient while it is in the cache.
        self._is_alone = exchange.blocks.processes == 1 and self._roots[-1] is flat
        # Positions of the gradients that all logical ranks so far lack, here.
        self._lacking: set[int] | None = None
        self._wait: Callable[[], None] | None = None

    @property
    def is_complete(self) -> bool:
        """Whether every gradient has arrived."""
        return len(self.fired) == len(self.slots)

    def describe(self) -> Iterator[str]:
        """Yield the name and layout of each slot, which must be the same on every process."""
        for slot in self.slots:
            yield slot.describe()

    def is_stale(self, position: int, gradient: Tensor) -> bool:
        """Return whether a gradient was added to the sum of the last step."""
        view = self.slots[position].view
        return gradient.data_ptr() == view.data_ptr() and gradient.numel() > 0

    def fold_small(
        self,
        lacking: Collection[int],
        fold: GradientFold,
    ) -> Tensor | None:
        """Take the small gradients of the next logical rank, which is not the last one here."""
        leaf = self._take_small(lacking, fold)
        return fold.fold_one(self._part, leaf)

    def pack_small(
        self,
        lacking: Collection[int],
        fold: GradientFold,
    ) -> None:
        """Pack the small gradients' part of each root."""
        leaf = self._take_small(lacking, fold)
        self._pack(self._part, leaf, [*self._smalls], fold)
        self.packed.update(range(len(self.slots)))

    def _take_small(self, lacking: Collection[int], fold: GradientFold) -> Tensor:
        leaf, missing = self._small.pack(lacking, is_first=fold.is_first)
        self._lacking = missing if self._lacking is None else self._lacking & missing
        return as_real(leaf).view(-1)

    def pack_one(self, position: int, gradient: Tensor | None, fold: GradientFold) -> None:
        """Pack one parameter's part of each root."""
        views = [views[position] for views in self._views]
        self._pack(self.indices[position], gradient, views, fold)
        self.packed.add(position)

    def _pack(
        self, part: int, gradient: Tensor | None, views: list[Tensor], fold: GradientFold
    ) -> None:
        end = partial(end_sum, divisor=self._divisor) if self._is_alone else None
        values = [held[part] for held in fold.held[: len(views) - 1]]
        for held in fold.held[: len(views) - 1]:
            held[part] = None
        values.append(fold.fold_one(part, gradient, views[-1], end))
        for view, value in zip(views, values, strict=True):
            if value is None:
                view.zero_()
            elif value is not view:
                view.copy_(value)

    def start(self, *, in_background: bool) -> None:
        """Start the exchange of the packed roots."""
        if self._is_alone:
            return
        roots = [as_real(root).view(-1) for root in self._roots]
        result = as_real(self._result).view(-1)
        self._wait = self._exchange.submit(
            roots, result, self._divisor, in_background=in_background
        )

    def finish(self) -> None:
        """Wait for the result, and set the gradients to views of it, but not those that lack."""
        if self._wait is not None:
            self._wait()
            self._wait = None
        if self._result is not self._bucket.flat:
            self._bucket.flat.copy_(self._result)
        lacking = self._lacking or ()
        for position, slot in enumerate(self.slots):
            if position not in lacking:
                slot.parameter.grad = slot.view
        self.fired.clear()
        self.packed.clear()

    def take_lacking(self) -> list[tuple[Slot, Tensor]]:
        """Return the slot and flag of each gradient that all logical ranks of here lack."""
        lacking, self._lacking = self._lacking or (), None
        flags = self._bucket.flags.real
        return [(self.slots[position], flags[position]) for position in lacking]


def lay_out_roots(
    parameters: Sequence[tuple[int, str, Parameter]],
    bucket_bytes: int,
    exchange: RootExchange,
    options: SumOptions,
    *,
    first_part: int,
) -> list[RootBucket | WholeGradient]:
    """Lay out the buckets of parameters, given with their indices and names.

    Those come first whose gradients tend to be complete first, in reverse order of registration.
    """
    indices = {id(parameter): index for index, _, parameter in parameters}
    whole = [] if options.sent_as else [entry for entry in parameters if is_whole(entry[2])]
    places = {index for index, _, _ in whole}
    packed = [(name, each) for index, name, each in parameters if index not in places]
    laid_out: list[tuple[int, Bucket | tuple[str, Parameter]]] = [
        (min(indices[id(slot.parameter)] for slot in bucket.slots), bucket)
        for bucket in lay_out(packed, bucket_bytes)
    ]
    laid_out += [(index, (name, each)) for index, name, each in whole]
    laid_out.sort(key=lambda entry: -entry[0])
    return [
        RootBucket(
            found,
            exchange,
            options,
            [indices[id(slot.parameter)] for slot in found.slots],
            first_part + number,
        )
        if isinstance(found, Bucket)
        else WholeGradient(*found, exchange, options.divisor, first)
        for number, (first, found) in enumerate(laid_out)
    ]


def settle_missing(buckets: Iterable[RootBucket], processes: int) -> None:
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


def _view_large_slots(root: Tensor, bucket: Bucket) -> Iterator[Tensor]:
    for slot in bucket.slots[: bucket.large]:
        view = root.as_strided(
            slot.view.shape, slot.view.stride(), root.storage_offset() + slot.start
        )
        yield as_real(view)
