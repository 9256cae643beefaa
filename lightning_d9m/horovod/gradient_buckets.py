"""Gradients in fixed buckets, each summed over the ranks while the backward pass still runs.

Horovod fuses the gradients that are ready at its next cycle, and the ring sums an element in an
order that depends on its offset in the fused buffer. Here the order of the parameters alone decides
the offset of every gradient, once: there is one flat buffer per bucket, always reduced whole, under
the same name and in the same order. Nothing depends on timing.

This module knows neither Horovod nor Lightning; the caller passes the collectives.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_d9m.errors import SettingError
from lightning_d9m.logical_ranks import bucket_layout
from lightning_d9m.logical_ranks.accumulation import make_dense
from lightning_d9m.logical_ranks.bucket_layout import (
    Bucket,
    Slot,
    lay_out,
    refuse_second_gradient,
)

if TYPE_CHECKING:
    from lightning_d9m.horovod.communication.communicator import Communicator
    from lightning_d9m.horovod.communication.transports import Pending

MEBIBYTE = 2**20
BUCKET_BYTES = 25 * MEBIBYTE  # as DDP: fewer exchanges cost less, where ranks share the cores

_ACTIVITY = "the backward pass"  # what a rank waits for, in errors


class _Mode(Enum):
    OUTSIDE = "outside"  # not inside `backward` or `blocked`
    BLOCKED = "blocked"  # gradients accumulate on this rank
    RUNNING = "running"  # a backward pass whose gradients are reduced


@dataclass(frozen=True)
class _PendingReduction:
    handle: "Pending"
    target: Tensor
    send_buffer: Tensor


class GradientBuckets:
    """The gradients of a model, packed, reduced and returned as views of the buckets.

    After a reduced backward pass ``parameter.grad`` is a view of a bucket; the next backward pass
    overwrites it. A parameter that gets no gradient keeps the one that it has.

    Args:
        named_parameters: All parameters in their order of registration. Frozen parameters join the
            buckets when they are unfrozen.
        reducer: The collectives of the run.
        op: ``"average"`` or ``"sum"``. As in DDP, an average multiplies each rank's gradient by
            1 / ranks before the sum, so that half precision does not overflow.
        bucket_bytes: Size at which a bucket is closed, in bytes; the first one at 1 MiB. With 0,
            each gradient is reduced alone.
        compression: ``"fp16"`` sends float32 and float64 gradients as float16. ``"bf16"`` rounds
            them to bfloat16 and sends them as float32, because Horovod 0.28.1 cannot sum bfloat16.
        sparse_as_dense: Reduce sparse gradients as dense ones; otherwise they are an error.
        on_stray: Called with the name of a parameter that gets a gradient outside `backward` and
            `blocked`.

    Raises:
        SettingError: A value is not allowed.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, Parameter]],
        reducer: "Communicator",
        *,
        op: Literal["average", "sum"] = "average",
        bucket_bytes: int = BUCKET_BYTES,
        compression: Literal["fp16", "bf16"] | None = None,
        sparse_as_dense: bool = False,
        on_stray: Callable[[str], None] | None = None,
    ) -> None:
        check_options(op=op, bucket_bytes=bucket_bytes, compression=compression)
        self._parameters = list(named_parameters)
        self._known = {id(parameter) for _, parameter in self._parameters}
        self._reducer = reducer
        self._scale = 1.0 / reducer.size if op == "average" else 1.0
        self._bucket_bytes = bucket_bytes
        self._compression = compression
        self._sparse_as_dense = sparse_as_dense
        self._on_stray = on_stray
        self._options = f"{op} {bucket_bytes} {compression}"
        self._mode = _Mode.OUTSIDE
        self._hooks: dict[int, Any] = {}
        # Bucket and position by the id of the parameter.
        self._slots: dict[int, tuple[Bucket, int]] = {}
        self._pending: list[_PendingReduction] = []
        self._fingerprints: dict[tuple[frozenset[int], ...], int] = {}
        self._buckets: list[Bucket] = []
        # The gradients of each bucket on which the ranks agreed last; None if they have not yet.
        self._agreed: tuple[frozenset[int], ...] | None = None
        self._next = 0  # the first bucket whose reduction has not started
        self._frozen: list[Parameter] = []
        self._build()

    def __len__(self) -> int:
        """The number of buckets."""
        return len(self._buckets)

    @property
    def is_blocked(self) -> bool:
        """Whether gradients currently accumulate on this rank alone."""
        return self._mode is _Mode.BLOCKED

    def holds(self, parameter: Tensor) -> bool:
        """Whether the gradients of this parameter are reduced."""
        return id(parameter) in self._known

    def close(self) -> None:
        """Remove the hooks and release the buffers; gradients that are views keep theirs."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks = {}
        self._slots = {}
        self._buckets = []
        self._pending = []

    @contextmanager
    def blocked(self) -> Iterator[None]:
        """Accumulate the gradients of backward passes inside on this rank alone."""
        before, self._mode = self._mode, _Mode.BLOCKED
        try:
            yield
        finally:
            self._mode = before

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Reduce the gradients of the backward pass inside; do nothing inside `blocked`."""
        if self._mode is not _Mode.OUTSIDE:
            yield
            return
        if any(parameter.requires_grad for parameter in self._frozen):
            self._build()
        for bucket in self._buckets:
            bucket.fired.clear()
            bucket.packed.clear()
        self._next = 0
        self._mode = _Mode.RUNNING
        try:
            yield
            self._finish()
        finally:
            self._mode = _Mode.OUTSIDE
            self._pending = []

    def _build(self) -> None:
        """Lay out the buckets of all parameters that are or were trained."""
        trainable: dict[int, tuple[str, Parameter]] = {}
        self._frozen = []
        for name, parameter in self._parameters:
            # A parameter that is frozen for a while (toggle_optimizer) keeps its slot.
            if not parameter.requires_grad and id(parameter) not in self._slots:
                self._frozen.append(parameter)
            else:  # by id, because a shared parameter has one gradient
                trainable.setdefault(id(parameter), (name, parameter))
        self._buckets = lay_out(list(trainable.values()), self._bucket_bytes)
        layout = [f"{b.index} {slot.describe()}" for b in self._buckets for slot in b.slots]
        self._layout = "\n".join([self._options, *layout])
        self._fingerprints = {}
        self._agreed = None
        self._slots = {
            id(slot.parameter): (bucket, position)
            for bucket in self._buckets
            for position, slot in enumerate(bucket.slots)
        }
        for key, (_, parameter) in trainable.items():
            if key not in self._hooks:
                hook = parameter.register_post_accumulate_grad_hook(self._on_gradient)
                self._hooks[key] = hook

    def _on_gradient(self, parameter: Tensor) -> None:
        if self._mode is _Mode.BLOCKED:
            return
        bucket, position = self._slots[id(parameter)]
        if self._mode is _Mode.OUTSIDE:
            if self._on_stray is not None:
                self._on_stray(bucket.slots[position].name)
        elif position in bucket.fired:
            if position in bucket.packed:
                refuse_second_gradient(bucket.slots[position].name)
        else:
            bucket.fired.add(position)
            if position < bucket.large:
                self._pack_large(bucket, position)
            if self._agreed is not None and bucket.is_complete:
                self._launch_complete(self._agreed)

    def _launch_complete(self, agreed: Sequence[frozenset[int]]) -> None:
        """Start the complete buckets, in order, that were complete on all ranks in the last pass.

        Of a bucket that was not, another rank may start a part without asking.
        """
        while self._next < len(self._buckets):
            bucket = self._buckets[self._next]
            if not bucket.is_complete or len(agreed[self._next]) < len(bucket.slots):
                return
            self._launch(bucket)
            self._next += 1

    @torch.no_grad()
    def _launch(self, bucket: Bucket) -> None:
        """Pack the gradients that have arrived in a bucket, and start to reduce each run."""
        for positions in bucket.find_runs():
            slots = bucket.slots[positions[0] : positions[-1] + 1]
            self._pack_small(bucket, positions)
            target = bucket.flat[slots[0].start : slots[-1].stop]
            if target.is_complex():
                target = torch.view_as_real(target).view(-1)
            send_buffer = target if self._is_sent_in_place(bucket.flat) else self._convert(target)
            name = f"d9m.bucket.{bucket.index}.{positions[0]}-{positions[-1]}"
            handle = self._reducer.start(send_buffer, name, _ACTIVITY)
            self._pending.append(_PendingReduction(handle, target, send_buffer))

    @torch.no_grad()
    def _pack_large(self, bucket: Bucket, position: int) -> None:
        """Copy one gradient into the buffer, scaled in the same pass if it is sent in place."""
        if self._reducer.size == 1:
            return
        slot = bucket.slots[position]
        torch.mul(self._densify(slot), self._scale_of(bucket), out=slot.view)
        slot.parameter.grad = slot.view
        bucket.packed.add(position)

    def _pack_small(self, bucket: Bucket, positions: Sequence[int]) -> None:
        """Copy the small gradients of a run of positions into the buffer in one call."""
        slots = bucket.slots[max(positions[0], bucket.large) : positions[-1] + 1]
        if not slots:
            return
        gradients = []
        for slot in slots:
            gradient = slot.parameter.grad
            if gradient is None or gradient.layout is not torch.strided:
                gradient = self._densify(slot)
            gradients.append(gradient)
        torch._foreach_copy_([slot.view for slot in slots], gradients)
        for slot in slots:
            slot.parameter.grad = slot.view
        scale = self._scale_of(bucket)
        if scale != 1.0:
            bucket.flat[slots[0].start : slots[-1].stop].mul_(scale)
        bucket.packed.update(positions)

    def _scale_of(self, bucket: Bucket) -> float:
        return self._scale if self._is_sent_in_place(bucket.flat) else 1.0

    def _densify(self, slot: Slot) -> Tensor:
        name, gradient = slot.name, slot.parameter.grad
        if gradient is None:
            raise SettingError(
                f"The gradient of {name!r} was removed before the ranks could reduce it. An "
                "optimizer that steps inside a backward hook works on one rank only: let Lightning "
                "step it."
            )
        return make_dense(name, gradient, allowed=self._sparse_as_dense)

    def _is_sent_in_place(self, flat: Tensor) -> bool:
        if flat.is_complex() or flat.dtype is torch.bfloat16:
            return False
        return self._compression is None or flat.dtype is torch.float16

    def _convert(self, target: Tensor) -> Tensor:
        """Return packed gradients, scaled, in the dtype in which they are sent."""
        if target.dtype is torch.bfloat16:
            return target.float().mul_(self._scale)
        if self._compression is not None and target.dtype in (torch.float32, torch.float64):
            scaled = target.mul(self._scale)
            return scaled.half() if self._compression == "fp16" else scaled.bfloat16().float()
        return target if self._scale == 1.0 else target.mul_(self._scale)

    @torch.no_grad()
    def _finish(self) -> None:
        """Agree on the gradients that exist, reduce the remaining buckets, and wait for all."""
        if self._reducer.size == 1:
            return
        # What was started without an agreement is what all ranks agreed on before. A rank whose
        # gradients are others announces them, and its peers find out when they wait for the sums.
        fired = tuple(frozenset(bucket.fired) for bucket in self._buckets)
        if fired != self._agreed or not self._reducer.polls_peers:
            self._agree()
        self._agreed = fired
        for bucket in self._buckets[self._next :]:
            self._launch(bucket)
        self._reducer.confirm(_ACTIVITY, self._agree)
        for pending in self._pending:
            self._reducer.finish(pending.handle, _ACTIVITY, self._agree)
            if pending.send_buffer.data_ptr() != pending.target.data_ptr():
                pending.target.copy_(pending.send_buffer)

    def _agree(self) -> None:
        fired = tuple(frozenset(bucket.fired) for bucket in self._buckets)
        fingerprint = self._fingerprints.get(fired)
        if fingerprint is None:
            text = "\n".join([self._layout, *self._fired_names()]).encode()
            digest = hashlib.blake2b(text, digest_size=8).digest()
            fingerprint = self._fingerprints[fired] = int.from_bytes(digest, "big") >> 2
        self._reducer.agree_on(fingerprint, _ACTIVITY, self._list_items)

    def _fired_names(self) -> tuple[str, ...]:
        return tuple(b.slots[position].name for b in self._buckets for position in sorted(b.fired))

    def _list_items(self) -> tuple[str, ...]:
        """Return the names, and the layout in case that is the difference."""
        layout = hashlib.blake2b(self._layout.encode(), digest_size=4).hexdigest()
        return (*self._fired_names(), f"layout of the buckets {layout} ({len(self)} buckets)")


def check_options(*, op: str, bucket_bytes: int, compression: str | None) -> None:
    """Check the arguments of `GradientBuckets` before any process is set up.

    Raises:
        SettingError: A value is not allowed.
    """
    bucket_layout.check_options(op=op, bucket_bytes=bucket_bytes)
    if compression not in {None, "fp16", "bf16"}:
        raise SettingError(
            f"compression={compression!r} is not known: pass 'fp16', 'bf16' or None."
        )
