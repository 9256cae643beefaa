"""Gradients of logical ranks, added in the order of the tree and averaged."""

import ctypes
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_d9m.errors import RanksDisagreeError, SettingError
from lightning_d9m.logical_ranks.buckets import Bucket, Slot, SumOptions, lay_out
from lightning_d9m.logical_ranks.exchange import RootExchange
from lightning_d9m.logical_ranks.tree import Blocks, count_merges
from lightning_d9m.ranks.groups import gather_bytes

BUCKET_BYTES = 25 * 2**20  # as DDP
# glibc's malloc: the settings of mallopt, their values, and the user's variables.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_TRIM_BYTES = 2**28
_MMAP_BYTES = 2**25  # the largest value that glibc accepts
_MALLOC_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_")
_SENT_AS = {None: None, "fp16": torch.float16, "bf16": torch.bfloat16}


class LogicalGradients:
    """The gradients of all logical ranks, summed along the tree.

    After each backward pass of this process except the last, `set_aside` takes the gradients away.
    After the last, `finish` leaves the average (or sum) over all logical ranks in
    ``parameter.grad``, the same bits on every process and for every number of processes. A missing
    gradient counts as +0.0, and stays None only if no logical rank has one.

    Inside `backward`, hooks add a large gradient as soon as it is there, and start to exchange a
    bucket while the last backward pass still runs. The bits do not depend on whether it is used.

    ``parameter.grad`` is then a view of a buffer that the next step overwrites. So begin each step
    with ``zero_grad(set_to_none=True)``. Sparse gradients are summed as dense ones.

    Args:
        named_parameters: All parameters in their order of registration. Which of them take part is
            decided in each step, by ``requires_grad``. Once trained, they keep their place.
        blocks: The logical ranks of all processes.
        process: This process.
        group: The process group whose ranks are the processes; None is torch's default group.
        op: ``"average"`` divides the sum once by the number of logical ranks.
        bucket_bytes: Size at which a bucket is closed, in bytes; the first one at 1 MiB.
        compression: ``"fp16"`` or ``"bf16"`` rounds gradients of float32 and float64 before they
            are sent, and their sum. It needs a process for each logical rank.
        adds: Sum also what autograd has added to the gradients of the last step, as DDP does.
            Otherwise that is an error.
        on_stray: Called with the name of a parameter that gets a gradient outside `backward`.

    Raises:
        SettingError: A value is not allowed.
    """

    def __init__(  # noqa: PLR0913 - one keyword for each setting
        self,
        named_parameters: Iterable[tuple[str, Parameter]],
        blocks: Blocks,
        process: int,
        group: Any = None,
        *,
        op: Literal["average", "sum"] = "average",
        bucket_bytes: int = BUCKET_BYTES,
        compression: Literal["fp16", "bf16"] | None = None,
        adds: bool = False,
        on_stray: Callable[[str], None] | None = None,
    ) -> None:
        check_options(op=op, bucket_bytes=bucket_bytes, compression=compression)
        self._block = block = blocks.of(process)
        self._next = block.start  # the logical rank whose gradients come in now
        # The numbers of held sums to which those of each logical rank are added.
        merges = count_merges(block.start, [rank + 1 for rank in block], blocks.logical_ranks)
        self._merges = dict(zip(block, merges, strict=True))
        self._exchange = RootExchange(blocks, process, group)
        divisor = blocks.logical_ranks if op == "average" else 1
        self._options = SumOptions(divisor, adds, _SENT_AS[compression])
        self._bucket_bytes = bucket_bytes
        self._on_stray = on_stray
        # A shared parameter has one gradient, and the first of its names.
        self._parameters: dict[int, tuple[str, Parameter]] = {}
        for name, parameter in named_parameters:
            self._parameters.setdefault(id(parameter), (name, parameter))
        self._buckets: list[Bucket] = []
        self._slots: dict[int, Slot] = {}
        self._hooks: list[Any] = []
        self._launched = 0  # buckets whose exchange has started
        self._is_inside = False  # whether a backward pass runs inside `backward`
        self._is_prepared = False  # whether the buckets are known to fit this step

    @property
    def bytes_sent(self) -> int:
        """The bytes of gradients that this process has sent so far."""
        return self._exchange.bytes_sent

    def holds(self, parameter: Tensor) -> bool:
        """Whether the gradients of this parameter are summed."""
        return id(parameter) in self._parameters

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
        assert logical_rank == self._next < self._block[-1], "another logical rank is next"
        self.prepare()
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
        for bucket in self._buckets[self._launched :]:
            self._launch(bucket)
        for bucket in self._buckets:
            bucket.fold()
        for bucket in self._buckets:
            bucket.finish()
        self._settle_missing()
        self._end_step()

    def _settle_missing(self) -> None:
        """Set the gradients that only other processes have, when all sums have ended.

        What no logical rank has stays as it is. One process knows that. Several wait for the flags
        of the sums, once for all buckets.
        """
        lacking = [pair for each in self._buckets for pair in each.take_lacking()]
        if self._exchange.group is None or not lacking:
            return
        device = lacking[0][1].device
        flags = torch.stack([flag.to(device, torch.float32) for _, flag in lacking]).tolist()
        for (slot, _), ranks in zip(lacking, flags, strict=True):
            if ranks:
                slot.parameter.grad = slot.view

    def discard(self) -> None:
        """Forget what was set aside in this step.

        On Gloo, call `close_connections` before: messages use the buffers, and other processes wait
        for this one. Then a new group is needed.
        """
        self._forget()  # a device may still use the buffers
        self._exchange.restart()
        self._end_step()
        for _, parameter in self._parameters.values():
            parameter.grad = None

    def close(self) -> None:
        """Remove the hooks and release the buffers; gradients that are views keep theirs."""
        self._forget()
        self._exchange.close()

    def _forget(self) -> None:
        self._remove_hooks()
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
        trained = [
            named
            for key, named in self._parameters.items()
            if named[1].requires_grad or key in self._slots
        ]
        self._buckets = lay_out(trained, self._bucket_bytes, self._exchange, self._options)
        self._agree(len(trained))
        self._slots = {id(slot.parameter): slot for each in self._buckets for slot in each.slots}
        self._register_hooks()
        self._is_prepared = True

    def _register_hooks(self) -> None:
        """Let hooks take large gradients, and start those buckets that others follow."""
        self._remove_hooks()
        starts = self._exchange.group is not None
        for slot in self._slots.values():
            is_start = starts and slot.bucket is not self._buckets[-1]
            if slot.part is not None or is_start or self._on_stray is not None:
                hook = slot.parameter.register_post_accumulate_grad_hook(self._on_gradient)
                self._hooks.append(hook)

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _matches(self) -> bool:
        """Whether the buckets hold the parameters that are trained now."""
        self._is_prepared = bool(self._buckets) and all(
            key in self._slots
            for key, (_, parameter) in self._parameters.items()
            if parameter.requires_grad
        )
        return self._is_prepared

    def _agree(self, count: int) -> None:
        """Check that all processes have the same buckets."""
        if self._exchange.group is None:
            return
        text = "\n".join(slot.describe() for bucket in self._buckets for slot in bucket.slots)
        digest = hashlib.blake2b(
            f"{self._options} {self._exchange.flushes}\n{text}".encode(), digest_size=16
        ).digest()
        digests = gather_bytes(digest, self._exchange.group)
        if len(set(digests)) > 1:
            others = [p for p, other in enumerate(digests) if other != digest]
            number = len(self._buckets)
            self._forget()
            raise RanksDisagreeError(
                f"The processes {', '.join(map(str, others))} train other parameters than this "
                f"one, which trains {count} in {number} buckets, or have other "
                "settings: build the same model on every process, and freeze and unfreeze its "
                "parameters at the same steps.",
                intents=[each.hex() for each in digests],
            )

    @torch.no_grad()
    def _on_gradient(self, parameter: Tensor) -> None:
        """Take a large gradient; in the last backward pass also start complete buckets."""
        slot = self._slots[id(parameter)]
        if not self._is_inside and self._on_stray is not None:
            self._on_stray(slot.name)
        if not self._is_inside or not (self._is_prepared or self._matches()):
            return
        if parameter.grad is None:
            raise SettingError(
                f"The gradient of {slot.name!r} was removed before the ranks could reduce it. An "
                "optimizer that steps inside a backward hook works on one rank only: let Lightning "
                "step it."
            )
        bucket, part, merges = slot.bucket, slot.part, self._merges[self._next]
        if bucket.is_launched or (part is not None and part.is_taken):
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

    def _launch(self, bucket: Bucket) -> None:
        """Start the exchange of a bucket, after what it still lacks is packed."""
        for part in bucket.parts:
            if not part.is_taken:
                part.pack(self._merges[self._next])
        self._launched += 1
        bucket.start()


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
    if compression not in _SENT_AS:
        raise SettingError(
            f"compression={compression!r} is not known: pass 'fp16', 'bf16' or None."
        )


def disable_malloc_trim() -> bool:
    """Let glibc keep up to 256 MiB of freed memory for later allocations.

    A backward pass allocates each gradient and frees it once it is packed. By default glibc returns
    such memory to the system and requests it again in each step, and the system clears every page.
    With the parameters of a ResNet-50 and two ranks on two cores (torch 2.13, glibc 2.36,
    ``benchmarks/horovod_fusion.py --modes static static-trimming``, two rounds) a step then has
    29,000 page faults instead of at most 130, and takes 16 % and 38 % more CPU time. Neither the
    results nor the peak of memory depend on this. The thresholds stay for the rest of the process,
    because glibc cannot return to its dynamic ones.

    Returns:
        Whether the thresholds were set: not if the user has set one by a variable, nor with another
        C library.
    """
    if any(name in os.environ for name in _MALLOC_VARIABLES) or "malloc" in os.environ.get(
        "GLIBC_TUNABLES", ""
    ):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    trim = mallopt(_M_TRIM_THRESHOLD, _TRIM_BYTES)
    return bool(trim and mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES))
