"""Writing values to places, ``put_`` and the max unpoolings: of several, the last wins.

torch's CUDA kernels let threads race for a place; its CPU kernels, on one thread, go from first
to last.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from lightning_d9m.patches.primitives.fallback import Original, overlaps_itself, raise_as_original
from lightning_d9m.patches.primitives.gather_tables import finish
from lightning_d9m.patches.primitives.segment_reduce import find_last


def put_(
    original: Original, self: Tensor, index: Tensor, source: Tensor, accumulate: bool = False
) -> Tensor:
    """Write the source into a tensor, at positions counted as if it were flat."""
    arguments = (self, index, source, accumulate)
    size = self.numel()
    if (
        index.dtype != torch.int64
        or source.dtype != self.dtype
        or source.numel() != index.numel()
        or (size == 0 and index.numel() > 0)
        or overlaps_itself(self)
    ):
        raise_as_original(original, *arguments)
    if not index.numel():
        return self
    places, values = index.flatten(), source.flatten()
    places = torch.where(places < 0, places + size, places)
    places = torch.where(places < 0, size, places)  # out of range, also for index_put_
    if not accumulate:
        # Every value for one place is made the same, so that the order of writing has no say.
        values = values.index_select(0, find_last(places))
    try:
        if self.is_contiguous():
            self.view(-1).index_put_((places,), values, accumulate=accumulate)
        else:
            self.index_put_(_unravel(places, self.shape), values, accumulate=accumulate)
    except (IndexError, RuntimeError):
        raise_as_original(original, *arguments)
    return self


def max_unpool2d(
    original: Original, self: Tensor, indices: Tensor, output_size: Sequence[int]
) -> Tensor:
    """Return zeros with each value at the position in its plane that its index names."""
    return _unpool(original, (self, indices, output_size), 2)


def max_unpool3d(
    original: Original,
    self: Tensor,
    indices: Tensor,
    output_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
) -> Tensor:
    """Return zeros with each value at the position in its volume that its index names."""
    arguments = (self, indices, output_size, stride, padding)
    if len(stride) != 3 or len(padding) != 3 or min(stride) < 1:  # noqa: PLR2004 - a number of dimensions
        raise_as_original(original, *arguments)
    return _unpool(original, arguments, 3)


def _unpool(
    original: Original,
    arguments: tuple[Any, ...],
    dims: int,
) -> Tensor:
    self: Tensor = arguments[0]
    indices, output_size = arguments[1:3]
    if (
        self.dim() not in (dims + 1, dims + 2)
        or indices.dtype != torch.int64
        or indices.shape != self.shape
        or len(output_size) != dims
        or min(self.shape[-dims - 1 :]) < 1
        or not self.is_floating_point()
    ):
        raise_as_original(original, *arguments)
    planes = prod(self.shape[:-dims])
    size = prod(self.shape[-dims:])
    values, places = self.reshape(planes, size), indices.reshape(planes, size)
    ranks = torch.arange(size, device=self.device).expand_as(places)
    # The greatest of some integers does not depend on the order in which they come.
    last = places.new_full((planes, prod(output_size)), -1)
    try:
        last.scatter_reduce_(1, places, ranks, "amax")
    except RuntimeError:
        raise_as_original(original, *arguments)  # an index lies outside its plane
    zero = torch.zeros((), dtype=self.dtype, device=self.device)
    result = torch.where(last >= 0, values.gather(1, last.clamp(min=0)), zero)
    return finish(result.view(*self.shape[:-dims], *output_size), self, keep_format=False)


def _unravel(places: Tensor, shape: Sequence[int]) -> tuple[Tensor, ...]:
    spots = []
    for size in reversed(shape[1:]):
        spots.append(places % size)
        places = places // size
    return (places, *reversed(spots))
