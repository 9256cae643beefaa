"""Gradients of logical ranks, added in the order of the tree and averaged."""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_d9m.errors import RanksDisagreeError, SettingError
from lightning_d9m.logical_ranks.accumulation import (
    GradientFold,
    Gradients,
    as_real,
    make_dense,
    refuse_stale,
    separate,
)
from lightning_d9m.logical_ranks.buckets import (
    MissingGradients,
    RootBucket,
    SumOptions,
    WholeGradient,
    check_options,
    lay_out_roots,
    refuse_removed,
    refuse_second_gradient,
    settle_missing,
)
from lightning_d9m.logical_ranks.exchange import RootExchange
from lightning_d9m.logical_ranks.tree import Blocks
from lightning_d9m.ranks.groups import gather_bytes

BUCKET_BYTES = 25 * 2**20  # as DDP
_SENT_AS = {None: None, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class _Place:
    """The bucket of a gradient, and its position there."""

    index: int
    bucket: RootBucket | WholeGradient
    position: int


class LogicalGradients:
    """The gradients of all logical ranks, summed along the tree.

    After each backward pass of this process except the last, `set_aside` takes the gradients away.
    After the last, `finish` leaves the average (or sum) over all logical ranks in
    ``parameter.grad``, the same bits on every process and for every number of processes. A missing
    gradient counts as +0.0, and stays None only if no logical rank has one.

    Inside `backward`, hooks add a large gradient as soon as it is there, and start to exchange a
    bucket while the last backward pass still runs. The bits do not depend on whether it is used.

    ``parameter.grad`` is then a view of a buffer that the next step overwrites. So begin each step
    with ``zero_grad(set_to_none=True)``.

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
        sparse_as_dense: Sum sparse gradients as dense ones; otherwise they are an error.
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
        sparse_as_dense: bool = False,
        adds: bool = False,
        on_stray: Callable[[str], None] | None = None,
    ) -> None:
        check_options(op=op, bucket_bytes=bucket_bytes, compression=compression)
        self._block = blocks.of(process)
        self._last = self._block[-1]
        self._fold = GradientFold(blocks, process)
        self._exchange = RootExchange(blocks, process, group)
        divisor = blocks.logical_ranks if op == "average" else 1
        self._options = SumOptions(divisor, sparse_as_dense, adds, _SENT_AS[compression])
        self._bucket_bytes = bucket_bytes
        self._on_stray = on_stray
        unique: dict[int, tuple[str, Parameter]] = {}
        for name, parameter in named_parameters:  # a shared parameter has one gradient
            unique.setdefault(id(parameter), (name, parameter))
        self._parameters = list(unique.values())
        self._known = unique.keys()
        self._buckets: list[RootBucket | WholeGradient] = []
        self._missing = MissingGradients((), self._exchange)
        self._places: dict[int, _Place] = {}
        self._large: list[_Place] = []
        self._hooks: list[Any] = []
        # The folded gradients of the next logical rank that hooks have taken, by index.
        self._taken: dict[int, Tensor | None] = {}
        self._launched = 0  # buckets whose exchange has started
        self._is_inside = False  # whether a backward pass runs inside `backward`
        self._is_laid_out = False
        self._is_prepared = False  # whether the buckets are known to fit this step

    @property
    def bytes_sent(self) -> int:
        """The bytes of gradients that this process has sent so far."""
        return self._exchange.bytes_sent

    def holds(self, parameter: Tensor) -> bool:
        """Whether the gradients of this parameter are summed."""
        return id(parameter) in self._known

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
            SettingError: Another logical rank is next, or a gradient is not allowed.
            RanksDisagreeError: Another process trains other parameters.
        """
        self._check_next(logical_rank, is_last=False)
        self.prepare()
        values: Gradients = [None] * (len(self._parameters) + len(self._buckets))
        for index, value in self._taken.items():
            values[index] = value
        places = [place for place in self._large if place.index not in self._taken]
        gradients = [self._take(place.index) for place in places]
        lacking: dict[int, list[int]] = {}
        for place, gradient in zip(places, gradients, strict=True):
            if gradient is None:
                lacking.setdefault(id(place.bucket), []).append(place.position)
        if self._fold.merges == 0:
            separate(gradients)
        for place, gradient in zip(places, gradients, strict=True):
            values[place.index] = self._fold.fold_one(place.index, gradient)
        for number, bucket in enumerate(self._buckets, start=len(self._parameters)):
            missing = lacking.get(id(bucket), ())
            values[number] = bucket.fold_small(missing, self._fold)
        self._fold.push(values)
        self._taken.clear()

    @torch.no_grad()
    def finish(self, logical_rank: int) -> None:
        """Take the gradients of the last logical rank; set ``grad`` to the sum over all of them.

        Raises:
            SettingError: Another logical rank is next, or a gradient is not allowed.
            RanksDisagreeError: Another process trains other parameters.
        """
        self._check_next(logical_rank, is_last=True)
        self.prepare()
        for bucket in self._buckets[self._launched :]:
            self.launch(bucket)
        for bucket in self._buckets:
            bucket.finish()
        packed = [bucket for bucket in self._buckets if isinstance(bucket, RootBucket)]
        settle_missing(packed, self._exchange.blocks.processes)
        self._missing.settle()
        self._end_step()

    def discard(self) -> None:
        """Forget what was set aside in this step.

        On Gloo, call `close_connections` before: messages use the buffers, and other processes wait
        for this one. Then a new group is needed.
        """
        self._forget()  # a device may still use the buffers
        self._exchange.restart()
        self._end_step()
        for _, parameter in self._parameters:
            parameter.grad = None

    def close(self) -> None:
        """Remove the hooks and release the buffers; gradients that are views keep theirs."""
        self._forget()
        self._exchange.close()

    def _forget(self) -> None:
        self._remove_hooks()
        self._places, self._large, self._buckets = {}, [], []
        self._missing = MissingGradients((), self._exchange)
        self._is_laid_out = False

    def _end_step(self) -> None:
        self._fold.clear()
        self._taken.clear()
        self._launched = 0
        self._is_prepared = False

    def _check_next(self, logical_rank: int, *, is_last: bool) -> None:
        first, last = self._block.start, self._last
        if logical_rank == self._fold.next and is_last == (logical_rank == last):
            return
        calls = f"finish({last})"
        if first < last:
            calls = f"set_aside({first}) to set_aside({last - 1}), then {calls}"
        raise SettingError(
            f"The gradients of logical rank {logical_rank} came in, but {self._fold.next} is next: "
            f"call {calls}, once per step and in this order. After an exception, call discard()."
        )

    # The buckets

    def prepare(self) -> None:
        """Lay out the buckets, if a parameter is trained that has no place; all processes must.

        Raises:
            RanksDisagreeError: Another process trains other parameters.
        """
        if self._is_prepared or self._matches():
            return
        trained = [
            (index, name, parameter)
            for index, (name, parameter) in enumerate(self._parameters)
            if parameter.requires_grad or id(parameter) in self._places
        ]
        self._buckets = lay_out_roots(
            trained,
            self._bucket_bytes,
            self._exchange,
            self._options,
            first_part=len(self._parameters),
        )
        self._agree(len(trained))
        whole = [bucket for bucket in self._buckets if isinstance(bucket, WholeGradient)]
        self._missing = MissingGradients(whole, self._exchange)
        self._places = {
            id(slot.parameter): _Place(bucket.indices[position], bucket, position)
            for bucket in self._buckets
            for position, slot in enumerate(bucket.slots)
        }
        self._large = [
            place for place in self._places.values() if place.position < place.bucket.large
        ]
        self._register_hooks()
        self._is_laid_out = self._is_prepared = True

    def _register_hooks(self) -> None:
        """Let hooks take large gradients, and start those buckets that others follow."""
        self._remove_hooks()
        hooked = [*self._large]
        if self._on_stray is not None:
            hooked = [*self._places.values()]
        elif self._exchange.group is not None:
            hooked += [
                place
                for place in self._places.values()
                if place.position >= place.bucket.large and place.bucket is not self._buckets[-1]
            ]
        for place in hooked:
            _, parameter = self._parameters[place.index]
            self._hooks.append(parameter.register_post_accumulate_grad_hook(self._on_gradient))

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _matches(self) -> bool:
        """Whether the buckets hold the parameters that are trained now."""
        self._is_prepared = self._is_laid_out and all(
            id(parameter) in self._places
            for _, parameter in self._parameters
            if parameter.requires_grad
        )
        return self._is_prepared

    def _agree(self, count: int) -> None:
        """Check that all processes have the same buckets."""
        if self._exchange.group is None:
            return
        text = "\n".join(line for bucket in self._buckets for line in bucket.describe())
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

    def _on_gradient(self, parameter: Tensor) -> None:
        """Take a large gradient; in the last backward pass also start complete buckets."""
        place = self._places[id(parameter)]
        if not self._is_inside and self._on_stray is not None:
            self._on_stray(self._parameters[place.index][0])
        if not self._is_inside or not (self._is_prepared or self._matches()):
            return
        if parameter.grad is None:
            refuse_removed(self._parameters[place.index][0])
        bucket, position = place.bucket, place.position
        is_last = self._fold.next == self._last
        if position < bucket.large:
            if is_last or self._fold.merges:
                self._take_large(place, is_last=is_last)
        elif position in bucket.packed:
            refuse_second_gradient(self._parameters[place.index][0])
        if is_last:
            bucket.fired.add(position)
            if bucket.is_complete:
                self._launch_complete()

    @torch.no_grad()
    def _take_large(self, place: _Place, *, is_last: bool) -> None:
        """Add a gradient while it is in the cache, and free its memory."""
        if place.index in self._taken or place.position in place.bucket.packed:
            refuse_second_gradient(self._parameters[place.index][0])
        gradient = self._take(place.index)
        if is_last:
            place.bucket.pack_one(place.position, gradient, self._fold)
        else:
            self._taken[place.index] = self._fold.fold_one(place.index, gradient)

    @torch.no_grad()
    def _launch_complete(self) -> None:
        """Start the complete buckets, in order; every process starts these in any case."""
        while self._launched < len(self._buckets) and self._buckets[self._launched].is_complete:
            self.launch(self._buckets[self._launched])

    def launch(self, bucket: RootBucket | WholeGradient) -> None:
        """Start the exchange of a bucket, after what it still lacks is packed."""
        lacking = []
        for position in range(bucket.large):
            if position not in bucket.packed:
                gradient = self._take(bucket.indices[position])
                if gradient is None:
                    lacking.append(position)
                bucket.pack_one(position, gradient, self._fold)
        bucket.pack_small(lacking, self._fold)
        self._launched += 1
        bucket.start()

    def _take(self, index: int) -> Tensor | None:
        """Take the gradient of a parameter away."""
        name, parameter = self._parameters[index]
        gradient = parameter.grad
        if gradient is None:
            return None
        gradient = make_dense(name, gradient, allowed=self._options.sparse_as_dense)
        place = self._places[id(parameter)]
        if not self._options.adds and place.bucket.is_stale(place.position, gradient):
            refuse_stale(name)
        parameter.grad = None
        return as_real(gradient)
