"""Buckets of gradients: laid out by the parameters alone, packed, exchanged and returned.

The order, size, dtype and device of the parameters decide the place of each gradient. A very large
one is summed where autograd has put it, without a copy.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from operator import eq
from typing import NoReturn, cast

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors
from torch.nn import Parameter

from lightning_d9m.errors import SettingError
from lightning_d9m.logical_ranks.accumulation import (
    GradientFold,
    as_real,
    is_half,
    make_dense,
    refuse_stale,
)
from lightning_d9m.logical_ranks.exchange import RootExchange, end_sum

# Vectorized reductions (the norm of a gradient that is clipped) add in a different order at an
# address that is not aligned like a separate allocation.
ALIGNMENT_BYTES = 64
# A gradient of at least this size is packed as soon as it arrives: it is still in the cache, and
# the next gradient reuses its memory. Smaller ones are packed in one call, which costs less, and so
# they follow the large ones in their bucket.
_LARGE_BYTES = 2**16
# The first bucket is small, as in DDP, so that the first reduction starts early.
_FIRST_BYTES = 2**20
# One message for each costs less than a copy of it.
_WHOLE_BYTES = 2**20
_DTYPES = (torch.float32, torch.float64)  # halves are summed as float32
# What autograd adds to in place is the same object, so it keeps its attributes.
_MARK = "d9m_sum_of_a_step"


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


@dataclass(slots=True)
class Slot:
    """One parameter's range of a bucket's buffer, and the view of it."""

    name: str
    parameter: Parameter
    start: int
    stop: int
    view: Tensor

    def describe(self) -> str:
        """Return the name and layout, which must be the same on every process."""
        return f"{self.name} {tuple(self.view.shape)} {self.view.dtype} {self.start}"


@dataclass(slots=True)
class Bucket:
    """A flat buffer and its slots.

    Attributes:
        flat: The buffer; slots begin at multiples of 64 bytes, with zeros between. One flag per
            slot follows.
        slots: One slot per parameter, the large parameters first.
        large: The number of large parameters.
    """

    flat: Tensor
    slots: list[Slot]
    large: int

    @property
    def flags(self) -> Tensor:
        """The elements after the last slot."""
        return self.flat[self.slots[-1].stop :]


def lay_out(parameters: Sequence[tuple[str, Parameter]], bucket_bytes: int) -> list[Bucket]:
    """Lay out buckets in reverse order of registration, in which gradients tend to arrive.

    Args:
        parameters: Names and parameters in their order of registration.
        bucket_bytes: Size at which a bucket is closed, in bytes. The first bucket of each dtype and
            device is closed at 1 MiB. With 0, each parameter has its own bucket.
    """
    by_kind: dict[tuple[torch.device, torch.dtype], list[tuple[str, Parameter]]] = {}
    for name, parameter in reversed(parameters):
        by_kind.setdefault((parameter.device, parameter.dtype), []).append((name, parameter))
    return [
        _make_bucket(chunk, device, dtype)
        for (device, dtype), members in by_kind.items()
        for chunk in _chunks(members, bucket_bytes)
    ]


def _chunks(
    members: Sequence[tuple[str, Parameter]], limit: int
) -> Iterator[list[tuple[str, Parameter]]]:
    """Yield chunks of at least ``limit`` bytes, the first of at least ``_FIRST_BYTES``."""
    chunk: list[tuple[str, Parameter]] = []
    held = 0
    enough = min(limit, _FIRST_BYTES)
    for name, parameter in members:
        chunk.append((name, parameter))
        held += parameter.numel() * parameter.element_size()
        if held >= enough:
            yield chunk
            chunk, held, enough = [], 0, limit
    if chunk:
        yield chunk


def _make_bucket(
    members: Sequence[tuple[str, Parameter]], device: torch.device, dtype: torch.dtype
) -> Bucket:
    step = max(1, ALIGNMENT_BYTES // members[0][1].element_size())
    members = sorted(members, key=lambda member: not _is_large(member[1]))
    starts = [0]
    for _, parameter in members:
        starts.append(starts[-1] + -(-parameter.numel() // step) * step)
    flat = torch.zeros(starts[-1] + len(members), dtype=dtype, device=device)
    slots = []
    for (name, parameter), start, stop in zip(members, starts[:-1], starts[1:], strict=True):
        view = view_like(flat, start, parameter)
        slots.append(Slot(name, parameter, start, stop, view))
    large = sum(_is_large(parameter) for _, parameter in members)
    return Bucket(flat, slots, large)


def _is_large(parameter: Parameter) -> bool:
    return parameter.nbytes >= _LARGE_BYTES


def view_like(flat: Tensor, start: int, parameter: Parameter) -> Tensor:
    """Return a view with the parameter's shape and, for channels_last, its strides."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    last = formats.get(parameter.dim())
    if last is not None and parameter.is_contiguous(memory_format=last):
        return flat.as_strided(parameter.shape, parameter.stride(), start)
    return flat[start : start + parameter.numel()].view(parameter.shape)


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


class SmallGradients:
    """Packs the small gradients of a bucket, and the flags of all its slots.

    Attributes:
        start: The place in the buffer of the bucket where they begin.
    """

    def __init__(self, bucket: Bucket, options: SumOptions) -> None:
        slots = bucket.slots[bucket.large :]
        self.start = slots[0].start if slots else bucket.slots[-1].stop
        self._first = bucket.large
        self._names = [slot.name for slot in slots]
        self._options = options
        self._parameters = [slot.parameter for slot in slots]
        self._views = [slot.view for slot in slots]
        # An empty gradient has no address.
        self._addresses = [view.data_ptr() if view.numel() else -1 for view in self._views]
        self._zeros: dict[int, Tensor] = {}
        self._reordered = [i for i, view in enumerate(self._views) if not view.is_contiguous()]
        # The parts of the buffer: gradients, the zeros between them, and the flags.
        self._places: list[int] = []
        self._parts: list[Tensor] = []
        for slot in slots:
            self._places.append(len(self._parts))
            self._parts.append(slot.view)
            if gap := slot.stop - slot.start - slot.view.numel():
                self._parts.append(bucket.flat.new_zeros(gap))
        self._parts.append(bucket.flat.new_ones(len(bucket.slots)))

    def pack(self, lacking: Collection[int], *, is_first: bool) -> tuple[Tensor, set[int]]:
        """Take the gradients away, and return them in a new buffer.

        Args:
            lacking: The positions of the large gradients that are missing.
            is_first: Whether they are the first of a step.

        Returns:
            The part of the bucket from ``start`` on, with zeros for missing gradients, and the
            positions of all gradients that are missing.
        """
        missing = set(lacking)
        gradients = self._find_gradients(missing)
        if is_first and not self._options.adds:
            addresses = [gradient.data_ptr() for gradient in gradients]
            if any(map(eq, addresses, self._addresses)):
                refuse_stale(self._names[list(map(eq, addresses, self._addresses)).index(True)])
        for place in self._reordered:
            gradients[place] = _put_in_order(gradients[place], self._views[place])
        for parameter in self._parameters:
            parameter.grad = None
        parts = [*self._parts]
        for place, gradient in zip(self._places, gradients, strict=True):
            parts[place] = gradient
        if missing:
            parts[-1] = self._clear_flags(missing)
        return _flatten_dense_tensors(parts), missing

    def _find_gradients(self, missing: set[int]) -> list[Tensor]:
        """Return dense gradients, with zeros for those that are missing, which are noted."""
        found = [parameter.grad for parameter in self._parameters]
        if {None if each is None else each.layout for each in found} == {torch.strided}:
            return cast("list[Tensor]", found)
        for place, gradient in enumerate(found):
            if gradient is None:
                missing.add(self._first + place)
                found[place] = self._zero(place)
            else:
                allowed = self._options.sparse_as_dense
                found[place] = make_dense(self._names[place], gradient, allowed=allowed)
        return cast("list[Tensor]", found)

    def _clear_flags(self, missing: Collection[int]) -> Tensor:
        flags = self._parts[-1].clone()
        for position in missing:  # the copy of a list to the device would wait
            flags[position].zero_()
        return flags

    def _zero(self, place: int) -> Tensor:
        if place not in self._zeros:
            self._zeros[place] = torch.zeros_like(self._views[place])
        return self._zeros[place]


def _put_in_order(gradient: Tensor, view: Tensor) -> Tensor:
    """Return the elements of a gradient in the order in which a view has them in memory."""
    if gradient.stride() != view.stride():
        gradient = torch.empty_like(view).copy_(gradient)
    return gradient.as_strided((gradient.numel(),), (1,))


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
        values = fold.take_roots(part, gradient, views[-1], end)
        for view, value in zip(views, values, strict=True):
            if value is None:
                view.zero_()
            elif value is not view:
                view.copy_(value)

    def start(self) -> None:
        """Start the exchange of the packed roots."""
        if self._is_alone:
            return
        roots = [as_real(root).view(-1) for root in self._roots]
        result = as_real(self._result).view(-1)
        self._wait = self._exchange.start(roots, result, self._divisor).finish

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


class WholeGradient:
    """A gradient on its way, which has no place in a bucket.

    It has the interface of a `RootBucket` with one slot. The sum is in the memory of the last root.

    ``is_whole`` is true of the parameter; the index is that by which the `GradientFold` counts
    it.
    """

    large = 1

    def __init__(
        self, name: str, parameter: Parameter, exchange: RootExchange, divisor: int, index: int
    ) -> None:
        layout = view_like(torch.empty(parameter.numel(), device="meta"), 0, parameter)
        self.slots = [Slot(name, parameter, 0, parameter.numel(), layout)]
        self.indices: Sequence[int] = [index]
        self.fired: set[int] = set()
        self.packed: set[int] = set()
        self._stride = layout.stride()
        self._parameter = parameter
        self._exchange = exchange
        self._divisor = divisor
        self._is_alone = exchange.blocks.processes == 1
        self._roots: list[Tensor] = []
        self._wait: Callable[[], None] | None = None
        self._was_missing: bool | None = None
        self._late: Tensor | None = None  # the sum, if no logical rank of here has a gradient

    @property
    def is_complete(self) -> bool:
        """True once the gradient has arrived."""
        return bool(self.fired)

    def describe(self) -> Iterator[str]:
        """Yield what must be the same on every process."""
        slot = self.slots[0]
        yield f"{slot.name} {tuple(slot.view.shape)} {self._parameter.dtype} whole"

    def is_stale(self, _position: int, gradient: Tensor) -> bool:
        """Return whether a gradient was added to the sum of the last step."""
        return hasattr(gradient, _MARK)

    def fold_small(self, lacking: Collection[int], _fold: GradientFold) -> None:
        """Note whether the next logical rank has a gradient; ``pack_small`` does, of the last."""
        self._was_missing = bool(lacking) and self._was_missing is not False

    pack_small = fold_small

    def pack_one(self, position: int, gradient: Tensor | None, fold: GradientFold) -> None:
        """Add the gradient of the last logical rank, and take the memory of each root."""
        if gradient is not None and not fold.merges:
            gradient = self._take_over(gradient)
        end = partial(end_sum, divisor=self._divisor) if self._is_alone else None
        values = fold.take_roots(self.indices[0], gradient, end=end)
        self._roots = [self._settle(value) for value in values]
        self.packed.add(position)

    def _take_over(self, gradient: Tensor) -> Tensor:
        """Return a gradient that nothing else refers to, or a copy of it."""
        is_ours = not gradient.requires_grad and _count_uses(gradient) <= _USES
        return self._settle(gradient) if is_ours else self._copy(gradient)

    def _settle(self, value: Tensor | None) -> Tensor:
        """Return a value in the memory that the sum may have at every number of processes."""
        if value is None:
            return torch.zeros_like(self._make_empty())
        is_settled = (
            value.stride() == self._stride
            and value.dtype == self._parameter.dtype
            and value.data_ptr() % ALIGNMENT_BYTES == 0
        )
        return value if is_settled else self._copy(value)

    def _copy(self, value: Tensor) -> Tensor:
        return self._make_empty().copy_(value)

    def _make_empty(self) -> Tensor:
        return torch.empty_strided(self._parameter.shape, self._stride, dtype=self._parameter.dtype)

    def start(self) -> None:
        """Start the exchange of the roots."""
        if self._is_alone:
            return
        roots = [root.as_strided((root.numel(),), (1,)) for root in self._roots]
        self._wait = self._exchange.start(roots, roots[-1], self._divisor).finish

    def finish(self) -> None:
        """Wait for the sum, and set the gradient to it."""
        if self._wait is not None:
            self._wait()
            self._wait = None
        gradient = self._roots[-1]
        setattr(gradient, _MARK, True)
        self._roots = []
        self._late = gradient if self._was_missing else None
        if self._late is None:
            self._parameter.grad = gradient
        self._was_missing = None
        self.fired.clear()
        self.packed.clear()

    @property
    def is_missing(self) -> bool:
        """Whether all logical ranks of here lack the gradient."""
        return self._late is not None

    def settle(self, *, is_found: bool) -> None:
        """Set a gradient that is missing here, if another process has it."""
        if self._late is not None and is_found:
            self._parameter.grad = self._late
        self._late = None


class MissingGradients:
    """Finds the whole gradients that no logical rank has, by one small sum.

    The gradients are all whole ones, the same on every process.
    """

    def __init__(self, gradients: Sequence[WholeGradient], exchange: RootExchange) -> None:
        self._gradients = gradients
        self._exchange = exchange

    def settle(self) -> None:
        """Set the gradients that only other processes have, when all sums have ended."""
        if not self._gradients:
            return
        count = len(self._exchange.roots[self._exchange.process])
        roots = [torch.zeros(len(self._gradients)) for _ in range(count)]
        missing = [gradient.is_missing for gradient in self._gradients]
        roots[-1].copy_(torch.tensor(missing, dtype=torch.bool).logical_not())
        self._exchange.start(roots, roots[-1]).finish()
        for gradient, found in zip(self._gradients, roots[-1].tolist(), strict=True):
            gradient.settle(is_found=bool(found))


def is_whole(parameter: Parameter) -> bool:
    """Return whether the gradient of a parameter is summed without a bucket."""
    return (
        parameter.device.type == "cpu"
        and parameter.dtype in _DTYPES
        and parameter.nbytes >= _WHOLE_BYTES
    )


def _count_uses(tensor: Tensor) -> int:
    """Return how many objects share the memory of a tensor."""
    storage = tensor.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata))  # noqa: SLF001 - torch has no public counter


_USES = _count_uses(torch.empty(1))  # of memory that nothing shares


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
