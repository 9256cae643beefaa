"""``put_`` and the max unpoolings: of several values for one place, the last one is written.

torch's CUDA kernels let threads race for a place; its CPU kernels, on one thread, go from first
to last.
"""

from collections.abc import Sequence
from functools import partial
from math import prod

import torch
from torch import Tensor

from lightning_d9m.patches.kernels.places import add_to_places, unravel
from lightning_d9m.patches.primitives.fallback import Original, holds, raise_as_original
from lightning_d9m.patches.primitives.segment_reduce import Update, find_last


def put(
    original: Original, self: Tensor, index: Tensor, source: Tensor, accumulate: bool = False
) -> Update:
    """Write the source into a tensor, at positions counted as if it were flat, or add it."""
    bound = partial(original, self, index, source, accumulate)
    size = self.numel()
    if (
        index.dtype != torch.int64
        or source.dtype != self.dtype
        or source.numel() != index.numel()
        or (size == 0 and index.numel() > 0)
    ):
        raise_as_original(bound)
    if not index.numel():
        return Update(lambda _: None)
    places, values = index.flatten(), source.flatten()
    if not holds((places >= -size) & (places < size)):
        raise_as_original(bound)
    places = torch.where(places < 0, places + size, places)

    def write(target: Tensor) -> None:
        target = target if target.dim() else target.view(1)
        if accumulate and (target.is_floating_point() or target.is_complex()):
            add_to_places(target, target.shape, places, values)
            return
        # Values for one place are equal, or integers, which are added exactly.
        last = values if accumulate else values.index_select(0, find_last(places, size))
        target.index_put_(unravel(places, target.shape), last, accumulate=accumulate)

    return Update(write)


def max_unpool2d(
    original: Original, self: Tensor, indices: Tensor, output_size: Sequence[int]
) -> Tensor:
    """Return zeros with each value at the position in its plane that its index names."""
    return _unpool(partial(original, self, indices, output_size), self, indices, output_size, 2)


def max_unpool3d(
    original: Original,
    self: Tensor,
    indices: Tensor,
    output_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
) -> Tensor:
    """Return zeros with each value at the position in its volume that its index names."""
    bound = partial(original, self, indices, output_size, stride, padding)
    if len(stride) != 3 or len(padding) != 3 or min(stride) < 1:  # noqa: PLR2004 - a number of dimensions
        raise_as_original(bound)
    return _unpool(bound, self, indices, output_size, 3)


def _unpool(
    bound: Original, self: Tensor, indices: Tensor, output_size: Sequence[int], dims: int
) -> Tensor:
    if (
        self.dim() not in (dims + 1, dims + 2)
        or indices.dtype != torch.int64
        or indices.shape != self.shape
        or len(output_size) != dims
        or min(self.shape[-dims - 1 :]) < 1
        or not self.is_floating_point()
    ):
        raise_as_original(bound)
    planes = prod(self.shape[:-dims])
    size = prod(self.shape[-dims:])
    values, places = self.reshape(planes, size), indices.reshape(planes, size)
    ranks = torch.arange(size, device=self.device).expand_as(places)
    # The greatest of some integers does not depend on their order.
    last = places.new_full((planes, prod(output_size)), -1)
    try:
        last.scatter_reduce_(1, places, ranks, "amax")
    except RuntimeError:
        raise_as_original(bound)  # an index lies outside its plane
    result = torch.where(last >= 0, values.gather(1, last.clamp(min=0)), 0)
    return result.view(*self.shape[:-dims], *output_size)
