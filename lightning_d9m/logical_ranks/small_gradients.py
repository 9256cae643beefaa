"""The small gradients of a bucket, which are packed in one call for each logical rank."""

from collections.abc import Collection
from operator import eq
from typing import cast

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors

from lightning_d9m.logical_ranks.accumulation import make_dense, refuse_stale
from lightning_d9m.logical_ranks.bucket_layout import Bucket, SumOptions


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
