"""Gradients of logical ranks, added in the order of the tree and averaged.

They lie in buckets. The order, size, dtype and device of the parameters decide the place of each.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal, cast

import torch
from torch import Tensor, distributed
from torch._utils import _flatten_dense_tensors
from torch.nn import Parameter

from lightning_d9m.engine.ranks.groups import ranks_of_group
from lightning_d9m.engine.ranks.ranks import agree
from lightning_d9m.errors import SettingError
from lightning_d9m.integrations.strategies.sums.accumulation import Summand, as_real, is_half
from lightning_d9m.integrations.strategies.sums.exchange import (
    LocalSum,
    RootExchange,
    round_up,
)
from lightning_d9m.integrations.strategies.sums.tree import Blocks, count_merges

# Vectorized reductions (the norm of a gradient that is clipped) add in a different order at an
# address that is not aligned like a separate allocation.
_ALIGNMENT_BYTES = 64
# A gradient of at least this size is packed as soon as it arrives: it is still in the cache, and
# the next gradient reuses its memory. Smaller ones are packed in one call, which costs less, and so
# they follow the large ones in their bucket. If all were packed so, a step of 13 million parameters
# would take 12 % to 20 % more CPU time and hold one more set of gradients (two cores, torch 2.13).
_LARGE_BYTES = 2**16
# The first bucket is small, as in DDP, so that the first reduction starts early.
_FIRST_BYTES = 2**20
# The sums of a bucket start when its last gradient has arrived, and each start costs a wait: few
# small buckets waste time, and one large one cannot overlap the backward pass.
BUCKET_BYTES = 25 * 2**20  # as DDP
SENT_AS = {None: None, "fp16": torch.float16, "bf16": torch.bfloat16}
Named = tuple[str, Parameter]


@dataclass(slots=True, eq=False)
class _Slot:
    """One parameter's place in a bucket.

    It is number ``position`` there, and begins at ``start`` in the buffer, of which ``view`` is the
    gradient. ``part`` adds the gradient if it is large.
    """

    bucket: "_Bucket"
    position: int
    name: str
    parameter: Parameter
    start: int
    view: Tensor
    part: Summand | None = None

    def describe(self) -> str:
        """Return the name and layout, which must be the same on every process."""
        return f"{self.name} {tuple(self.view.shape)} {self.view.dtype} {self.start}"


class _LargeGradient(Summand):
    """A gradient that is added as soon as it arrives."""

    def __init__(self, slot: _Slot) -> None:
        bucket, parameter = slot.bucket, slot.parameter
        roots = [_view_like(root, slot.start, parameter) for root in bucket.roots]
        super().__init__([as_real(root) for root in roots])
        self._slot = slot

    def take(self) -> Tensor | None:
        slot, parameter = self._slot, self._slot.parameter
        if parameter.grad is None:
            slot.bucket.missing.add(slot.position)
            return None
        gradient = _make_dense(parameter.grad)
        parameter.grad = None
        return as_real(gradient)


class _SmallGradients(Summand):
    """The small gradients of a bucket and the flags of all, packed in one call after the large."""

    def __init__(self, bucket: "_Bucket", slots: Sequence[_Slot], start: int, step: int) -> None:
        super().__init__([as_real(root[start:]).view(-1) for root in bucket.roots])
        self._bucket, self._slots = bucket, slots
        # The pieces of the buffer from there: gradients, the zeros between them, and the flags.
        self._pieces: list[Tensor] = []
        self._places: list[int] = []
        for view in (slot.view for slot in slots):
            self._places.append(len(self._pieces))
            self._pieces.append(view)
            if gap := round_up(view.numel(), step) - view.numel():
                self._pieces.append(bucket.flat.new_zeros(gap))
        self._pieces.append(bucket.flat.new_ones(len(bucket.slots)))

    def take(self) -> Tensor:
        bucket = self._bucket
        missing, bucket.missing = bucket.missing, set()
        pieces = [*self._pieces]
        for slot, place in zip(self._slots, self._places, strict=True):
            gradient, slot.parameter.grad = slot.parameter.grad, None
            if gradient is None:
                missing.add(slot.position)
                gradient = torch.zeros_like(slot.view)
            gradient = _make_dense(gradient)
            # `_flatten_dense_tensors` takes elements in the order of their indices, and the view
            # has them in that of its strides.
            if not slot.view.is_contiguous():
                gradient = _put_in_order(gradient, slot.view)
            pieces[place] = gradient
        if missing:
            # The ones are shared by all steps, so this step changes a copy.
            pieces[-1] = flags = pieces[-1].clone()
            for position in missing:  # the copy of a list to the device would wait
                flags[position].zero_()
        bucket.lacking = missing if bucket.lacking is None else bucket.lacking & missing
        # One call packs all of them, because a copy of a small gradient costs less than its call.
        return as_real(_flatten_dense_tensors(pieces)).view(-1)


class _Bucket:
    """A flat buffer with a slot for each gradient, and one more for each root of this process.

    Slots begin at multiples of 64 bytes, with zeros between. One flag per slot follows: it is 1 in
    each logical rank that has the gradient, so the sum of the flags tells whether any has it.

    The last root has the memory of the result, if their dtypes agree.

    Attributes:
        flat: The buffer, which receives the result.
        roots: The buffers of the roots.
        slots: One slot per parameter, those of large ones first.
        parts: What adds the gradients: one for each large one, and one for all else.
        fired: Positions of the slots whose gradients have arrived.
        missing: Positions of the large gradients that the next logical rank lacks.
        lacking: Positions of the gradients that all logical ranks of this process have lacked so
            far; None before the first.
        pending: The exchange of this step, once it has started.
    """

    def __init__(
        self,
        members: Sequence[Named],
        exchange: RootExchange,
        divisor: int,
        sent_as: torch.dtype | None,
    ) -> None:
        members = sorted(members, key=lambda member: not _is_large(member[1]))
        first = members[0][1]
        step = max(1, _ALIGNMENT_BYTES // first.element_size())
        sizes = (round_up(each.numel(), step) for _, each in members)
        starts = [*accumulate(sizes, initial=0)]
        self._exchange, self._divisor = exchange, divisor
        size = starts[-1] + len(members)
        self.flat = torch.zeros(size, dtype=first.dtype, device=first.device)
        self._make_roots(sent_as)
        self.slots = [
            _Slot(self, position, name, each, start, _view_like(self.flat, start, each))
            for position, ((name, each), start) in enumerate(zip(members, starts, strict=False))
        ]
        self.parts: list[Summand] = []
        for slot in self.slots:
            if _is_large(slot.parameter):
                slot.part = _LargeGradient(slot)
                self.parts.append(slot.part)
        count = len(self.parts)
        self.parts.append(_SmallGradients(self, self.slots[count:], starts[count], step))
        self.fired: set[int] = set()
        self.missing: set[int] = set()
        self.lacking: set[int] | None = None
        self.pending: LocalSum | None = None

    def _make_roots(self, sent_as: torch.dtype | None) -> None:
        exchange, flat, dtype = self._exchange, self.flat, self.flat.dtype
        is_rounded = sent_as is not None and dtype in (torch.float32, torch.float64)
        if sent_as is not None and is_rounded:
            dtype = sent_as
        # Half types can travel as they are if every root is a leaf.
        if is_half(flat) and exchange.blocks.processes < exchange.blocks.logical_ranks:
            dtype = torch.float32
        count = len(exchange.roots[exchange.process])
        self.roots = [torch.zeros_like(flat, dtype=dtype) for _ in range(count)]
        if dtype is flat.dtype:
            # So a process with one root needs no second buffer, and the result is where the
            # gradients are read.
            self.roots[-1] = flat
        self._result = self.roots[-1] if is_rounded else flat

    def start(self) -> None:
        """Start the exchange of the packed roots."""
        roots = [as_real(root).view(-1) for root in self.roots]
        result = as_real(self._result).view(-1)
        self.pending = self._exchange.start(roots, result, self._divisor)

    def finish(self) -> list[tuple[_Slot, Tensor]]:
        """Wait for the result, and set the gradients to views of it, but not those that lack.

        Returns:
            The slot and flag of each gradient that all logical ranks of this process lack.
        """
        assert self.pending is not None, "it has started"
        self.pending.finish()
        self.pending = None
        if self._result is not self.flat:
            self.flat.copy_(self._result)
        lacking, self.lacking = self.lacking or set(), None
        for slot in self.slots:
            if slot.position not in lacking:
                slot.parameter.grad = slot.view
        for part in self.parts:
            part.is_taken = False
        self.fired.clear()
        # Any number but 0 says that a logical rank has the gradient: the flags are divided as all
        # else.
        flags = self.flat[len(self.flat) - len(self.slots) :].real
        return [(self.slots[position], flags[position]) for position in lacking]


def _lay_out(parameters: Sequence[Named], bucket_bytes: int) -> list[list[Named]]:
    """Return the members of buckets.

    Their order is the reverse of the registration, in which gradients tend to arrive. With
    ``bucket_bytes=0`` each parameter has its own bucket.
    """
    backwards = [*parameters][::-1]
    if not backwards:  # which the function below refuses
        return []
    limits = [min(bucket_bytes, _FIRST_BYTES), bucket_bytes]
    # As DDP: a bucket has one dtype and device, as it is one tensor; buckets of several kinds fill
    # side by side.
    buckets, _ = distributed._compute_bucket_assignment_by_size(  # type: ignore[attr-defined]  # noqa: SLF001 - not public
        [parameter for _, parameter in backwards], limits
    )
    # Those come first whose last gradient tends to come first.
    return [[backwards[place] for place in bucket] for bucket in sorted(buckets, key=max)]


def _view_like(flat: Tensor, start: int, parameter: Parameter) -> Tensor:
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


class LogicalGradients:
    """The gradients of all logical ranks, summed along the tree.

    After each backward pass of this process except the last, `set_aside` takes the gradients away.
    After the last, `finish` leaves the average (or sum) over all logical ranks in
    ``parameter.grad``, the same bits on every process and for every number of processes. A missing
    gradient counts as +0.0, and stays None only if no logical rank has one.

    Inside `backward`, hooks add a large gradient as soon as it is there, and start to exchange a
    bucket while the last backward pass still runs. The bits do not depend on whether it is used.

    ``parameter.grad`` is then a view of a buffer that the next step overwrites. What autograd adds
    to the gradients of the last step is summed, too, as DDP does. Sparse gradients are summed as
    dense ones.

    Args:
        list_parameters: Returns all parameters in their order of registration, with names. Which of
            them take part is decided in each step, by ``requires_grad``. Once trained, they keep
            their place.
        blocks: The logical ranks of all processes.
        process: This process.
        group: The process group whose ranks are the processes; None is torch's default group.
        op: ``"average"`` divides the sum once by the number of logical ranks.
        bucket_bytes: Size at which a bucket is closed, in bytes; the first one at 1 MiB.
        compression: ``"fp16"`` or ``"bf16"`` rounds gradients of float32 and float64 before they
            are sent, and their sum. It needs a process for each logical rank.
        on_stray: Called with the name of a parameter that gets a gradient outside `backward`.
    """

    def __init__(
        self,
        list_parameters: Callable[[], Iterable[Named]],
        blocks: Blocks,
        process: int,
        group: Any = None,
        *,
        op: Literal["average", "sum"] = "average",
        bucket_bytes: int = BUCKET_BYTES,
        compression: Literal["fp16", "bf16"] | None = None,
        on_stray: Callable[[str], None] | None = None,
    ) -> None:
        self._block = block = blocks.of(process)
        self._next = block.start  # the logical rank whose gradients come in now
        # The numbers of held sums to which those of each logical rank are added.
        # Computed once: the tree does not depend on the step.
        merges = count_merges(block.start, [rank + 1 for rank in block], blocks.logical_ranks)
        self._merges = dict(zip(block, merges, strict=True))
        self._exchange = RootExchange(blocks, process, group)
        self._divisor = blocks.logical_ranks if op == "average" else 1
        self._sent_as = SENT_AS[compression]
        self._bucket_bytes = bucket_bytes
        self._on_stray = on_stray
        # Not the parameters of now: a program may add some between two steps.
        self._list_parameters = list_parameters
        self._buckets: list[_Bucket] = []
        self._slots: dict[int, _Slot] = {}
        self._hooks: list[Any] = []
        self._launched = 0  # buckets whose exchange has started
        self._is_inside = False  # whether a backward pass runs inside `backward`
        self._is_prepared = False  # whether the buckets are known to fit this step

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Add and exchange gradients while the backward pass of the next logical rank runs."""
        self._is_inside = True
        try:
            yield
        finally:
            self._is_inside = False

    @torch.no_grad()
    def set_aside(self, logical_rank: int) -> None:
        """Take the gradients of a logical rank away, which is not the last of this process.

        Raises:
            SettingError: A gradient is not allowed.
            RanksDisagreeError: Another process trains other parameters.
        """
        # The place in the tree follows from the order of the calls, so a call out of order would be
        # a wrong sum without an error.
        assert logical_rank == self._next < self._block[-1], "another logical rank is next"
        self.prepare()
        # Of this logical rank alone: two gradients of one backward pass may share memory, those of
        # two passes do not.
        storages: set[int] = set()
        for bucket in self._buckets:
            for part in bucket.parts:
                if not part.is_taken:
                    part.set_aside(self._merges[logical_rank], storages)
                part.is_taken = False
        self._next += 1

    @torch.no_grad()
    def finish(self, logical_rank: int) -> None:
        """Take the gradients of the last logical rank; set ``grad`` to the sum over all of them.

        Raises:
            SettingError: A gradient is not allowed.
            RanksDisagreeError: Another process trains other parameters.
        """
        assert logical_rank == self._next == self._block[-1], "another logical rank is next"
        self.prepare()
        # Buckets without a hook, and those that lack a gradient which no backward pass gave.
        for bucket in self._buckets[self._launched :]:
            self._launch(bucket)
        for bucket in self._buckets:  # what other processes wait for, before any result
            cast("LocalSum", bucket.pending).fold()
        lacking = [pair for bucket in self._buckets for pair in bucket.finish()]
        # What no logical rank has stays as it is. One process knows that. Several wait for the
        # flags of the sums, once for all buckets.
        if self._exchange.group is not None and lacking:
            device = lacking[0][1].device
            flags = torch.stack([flag.to(device, torch.float32) for _, flag in lacking]).tolist()
            for (slot, _), ranks in zip(lacking, flags, strict=True):
                if ranks:
                    slot.parameter.grad = slot.view
        self._end_step()

    def close(self) -> None:
        """Remove the hooks and release the buffers; gradients that are views keep theirs.

        Within a step, on Gloo, call `close_connections` before: messages use the buffers, and other
        processes wait for this one. Then a new group is needed.
        """
        self._forget()
        self._end_step()
        # This also lets a process fail that waits in shared memory for this one.
        self._exchange.close()

    def _forget(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._slots, self._buckets = {}, []

    def _end_step(self) -> None:
        self._next = self._block.start
        self._launched = 0
        self._is_prepared = False

    # The buckets

    def prepare(self) -> None:
        """Lay out the buckets, if a parameter is trained that has no place; all processes must.

        Raises:
            RanksDisagreeError: Another process trains other parameters.
        """
        if self._is_prepared or self._matches():
            return
        # A parameter that is frozen now keeps its place: two optimizers that alternate would
        # otherwise lay out the buckets in each step.
        trained = [
            named
            for named in self._list_parameters()
            if named[1].requires_grad or id(named[1]) in self._slots
        ]
        self._forget()
        members = _lay_out(trained, self._bucket_bytes)
        buckets = [_Bucket(each, self._exchange, self._divisor, self._sent_as) for each in members]
        slots = [slot for bucket in buckets for slot in bucket.slots]
        # All that decides a bit or a message, so that processes with different options fail here
        # instead of hanging or differing.
        settings = f"settings {self._divisor} {self._sent_as} {self._exchange.flushes}"
        agree(
            ranks_of_group(self._exchange.group),
            f"the sum of the gradients of {len(trained)} parameters",
            [settings, *(slot.describe() for slot in slots)],
        )
        self._buckets, self._slots = buckets, {id(slot.parameter): slot for slot in slots}
        # Hooks take large gradients, and start those buckets that others follow.
        # The last bucket gets no hook for that: nothing is left to overlap when it is complete.
        # Each hook is a call of Python for each gradient.
        starts = self._exchange.group is not None
        for slot in self._slots.values():
            is_start = starts and slot.bucket is not self._buckets[-1]
            if slot.part is not None or is_start or self._on_stray is not None:
                hook = slot.parameter.register_post_accumulate_grad_hook(self._on_gradient)
                self._hooks.append(hook)
        self._is_prepared = True

    def _matches(self) -> bool:
        """Return whether the buckets hold the parameters that are trained now."""
        self._is_prepared = bool(self._buckets) and all(
            id(parameter) in self._slots
            for _, parameter in self._list_parameters()
            if parameter.requires_grad
        )
        return self._is_prepared

    @torch.no_grad()
    def _on_gradient(self, parameter: Tensor) -> None:
        """Take a large gradient; in the last backward pass also start complete buckets."""
        slot = self._slots[id(parameter)]
        if not self._is_inside and self._on_stray is not None:
            # `loss.backward()` of the program does not pass through Lightning, so that no one sums
            # afterwards.
            self._on_stray(slot.name)
        # One that the program has frozen since the forward pass gets no gradient.
        takes = self._is_inside and parameter.requires_grad
        if not takes or not (self._is_prepared or self._matches()):
            return
        if parameter.grad is None:
            raise SettingError(
                f"The gradient of {slot.name!r} was removed before the ranks could reduce it. An "
                "optimizer that steps inside a backward hook works on one rank only: let Lightning "
                "step it."
            )
        bucket, part, merges = slot.bucket, slot.part, self._merges[self._next]
        if bucket.pending is not None or (part is not None and part.is_taken):
            raise SettingError(
                f"The parameter {slot.name!r} got a second gradient in one backward pass, after "
                "its first was added to the sum. Reentrant activation checkpointing of a shared "
                "parameter does that: pass use_reentrant=False to torch.utils.checkpoint."
            )
        if self._next == self._block[-1]:
            if part is not None:
                part.pack(merges)
            bucket.fired.add(slot.position)
            # In order, in which every process starts these in any case.
            for each in self._buckets[self._launched :]:
                if len(each.fired) < len(each.slots):
                    break
                self._launch(each)
        elif part is not None and merges:  # while it is in the cache, and to free its memory
            part.set_aside(merges)

    def _launch(self, bucket: _Bucket) -> None:
        """Start the exchange of a bucket, after what it still lacks is packed."""
        for part in bucket.parts:
            if not part.is_taken:
                part.pack(self._merges[self._next])
        self._launched += 1
        bucket.start()
