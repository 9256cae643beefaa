"""Buckets of gradients on their way: the roots of a process, packed, exchanged and returned."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_d9m.logical_ranks.accumulation import GradientFold, Gradients, as_real, is_half
from lightning_d9m.logical_ranks.bucket_layout import Bucket, lay_out
from lightning_d9m.logical_ranks.exchange import RootExchange


class RootBucket:
    """A bucket, with one flat buffer for each root of this process.

    The last root has the memory of the result, if their dtypes agree. The flag of a slot is 1 where
    a gradient exists, so the sum of the flags tells whether any logical rank has one.

    Args:
        bucket: The bucket, whose flat tensor receives the result.
        exchange: The exchange with the other processes.
        divisor: Divides the sum.
        indices: The parameter of each slot, as the `GradientFold` counts them.

    Attributes:
        large: The slots before this position are packed one by one.
        indices: The parameter of each slot.
        fired: Positions of the slots whose gradients have arrived.
        packed: Positions of the slots that are packed.
    """

    def __init__(
        self, bucket: Bucket, exchange: RootExchange, divisor: int, indices: Sequence[int]
    ) -> None:
        self._bucket = bucket
        self._exchange = exchange
        self._divisor = divisor
        self.indices = indices
        self.slots, self.large = bucket.slots, bucket.large
        self.fired, self.packed = bucket.fired, bucket.packed
        flat = bucket.flat
        count = len(exchange.roots[exchange.process])
        if is_half(flat) and not exchange.sends_leaves:
            self._roots = [torch.zeros_like(flat, dtype=torch.float32) for _ in range(count)]
        else:
            self._roots = [torch.zeros_like(flat) for _ in range(count - 1)] + [flat]
        self._views = [list(_view_slots(root, bucket)) for root in self._roots]
        # Root and position of each gradient that is missing in this step.
        self._missing: list[tuple[int, int]] = []
        self._wait: Callable[[], None] | None = None

    @property
    def is_complete(self) -> bool:
        """Whether every gradient has arrived."""
        return len(self.fired) == len(self.slots)

    def describe(self) -> Iterator[str]:
        """Yield the name and layout of each slot, which must be the same on every process."""
        for slot in self.slots:
            yield f"{slot.name} {tuple(slot.view.shape)} {slot.view.dtype} {slot.start}"

    def pack_one(self, position: int, gradient: Tensor | None, fold: GradientFold) -> None:
        """Pack one parameter's part of each root."""
        index, last = self.indices[position], len(self._roots) - 1
        out = self._views[last][position]
        value = fold.fold_one(index, gradient, out)
        for root in range(last):
            self._store(root, position, fold.held[root][index])
            fold.held[root][index] = None
        self._store(last, position, value)
        self.packed.add(position)

    def _store(self, root: int, position: int, value: Tensor | None) -> None:
        view = self._views[root][position]
        if value is None:
            self._missing.append((root, position))
        elif value is not view:
            view.copy_(value)

    def pack_many(self, positions: Sequence[int], gradients: Gradients, fold: GradientFold) -> None:
        """Pack several parameters' part of each root, in a few calls."""
        indices = [self.indices[position] for position in positions]
        last = fold.fold_many(indices, gradients)
        for root in range(len(self._roots) - 1):
            held = fold.held[root]
            self._store_many(root, positions, [held[index] for index in indices])
            for index in indices:
                held[index] = None
        self._store_many(len(self._roots) - 1, positions, last)
        self.packed.update(positions)

    def _store_many(self, root: int, positions: Sequence[int], values: Gradients) -> None:
        views = self._views[root]
        targets, sources = [], []
        for position, value in zip(positions, values, strict=True):
            if value is None:
                self._missing.append((root, position))
            else:
                targets.append(views[position])
                sources.append(value)
        if targets:
            torch._foreach_copy_(targets, sources)

    def start(self, *, in_background: bool) -> None:
        """Start the exchange of the packed roots."""
        start = self.slots[-1].stop
        for root in self._roots:
            root[start:].fill_(1.0)
        for number, position in self._missing:
            slot, root = self.slots[position], self._roots[number]
            root[slot.start : slot.stop].zero_()
            root[start + position] = 0.0
        roots = [as_real(root).view(-1) for root in self._roots]
        result = as_real(self._bucket.flat).view(-1)
        pending = self._exchange.start(roots, result, self._divisor)
        self._wait = (
            self._exchange.finish_in_background(pending) if in_background else pending.finish
        )

    def finish(self) -> None:
        """Wait for the result, and set the gradients to views of it."""
        assert self._wait is not None
        self._wait()
        self._wait = None
        for slot in self.slots:
            slot.parameter.grad = slot.view
        if self._missing:
            self._remove_missing()
        self.fired.clear()
        self.packed.clear()

    def _remove_missing(self) -> None:
        """Set the gradients that all logical ranks lack to None."""
        lacking = {position for _, position in self._missing}
        for root in range(len(self._roots)):
            lacking &= {position for number, position in self._missing if number == root}
        self._missing.clear()
        if lacking:  # here; another process may have them
            flags = (self._bucket.flags.real > 0).tolist()
            for position in lacking:
                if not flags[position]:
                    self.slots[position].parameter.grad = None


def lay_out_roots(
    parameters: Sequence[tuple[int, str, Parameter]],
    bucket_bytes: int,
    exchange: RootExchange,
    divisor: int,
) -> list[RootBucket]:
    """Lay out the buckets of parameters, given with their indices and names."""
    indices = {id(parameter): index for index, _, parameter in parameters}
    pairs = [(name, parameter) for _, name, parameter in parameters]
    return [
        RootBucket(bucket, exchange, divisor, [indices[id(s.parameter)] for s in bucket.slots])
        for bucket in lay_out(pairs, bucket_bytes, with_flags=True)
    ]


def _view_slots(root: Tensor, bucket: Bucket) -> Iterator[Tensor]:
    for slot in bucket.slots:
        view = root.as_strided(
            slot.view.shape, slot.view.stride(), root.storage_offset() + slot.start
        )
        yield as_real(view)
