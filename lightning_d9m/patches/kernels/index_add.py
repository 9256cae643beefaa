"""Adding rows where an index says: ``index_add``, ``index_put`` and the gradient of ``Embedding``.

torch has deterministic versions, which sort by index and then go through the duplicates of a place
one after the other. These sort too, and let every feature of every place have a reader of its own.
"""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from lightning_d9m.patches.primitives.fallback import Original, holds, overlaps_itself
from lightning_d9m.patches.primitives.segment_reduce import sum_segments


def index_add(
    original: Original, self: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: float = 1
) -> Tensor:
    """Return a copy with the source's slices added where the index says, in their order."""
    sums = _sum_slices(self, dim, index, source)
    if sums is None:
        result: Tensor = original(self, dim, index, source, alpha=alpha)
        return result
    return self.clone(memory_format=torch.contiguous_format).add_(sums, alpha=alpha)


def index_add_(
    original: Original, self: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: float = 1
) -> Tensor:
    """Add the source's slices where the index says, in their order."""
    sums = None if overlaps_itself(self) else _sum_slices(self, dim, index, source)
    if sums is None:
        result: Tensor = original(self, dim, index, source, alpha=alpha)
        return result
    return self.add_(sums, alpha=alpha)


def embedding_dense_backward(
    original: Original,
    grad_output: Tensor,
    indices: Tensor,
    num_weights: int,
    padding_idx: int,
    scale_grad_by_freq: bool,
) -> Tensor:
    """Return the gradient with respect to the table, of shape ``[num_weights, features]``."""
    if scale_grad_by_freq or not grad_output.is_floating_point() or not grad_output.numel():
        result: Tensor = original(
            grad_output, indices, num_weights, padding_idx, scale_grad_by_freq
        )
        return result
    keys = indices.flatten()
    keys = torch.where(keys == padding_idx, -1, keys)
    rows = grad_output.reshape(keys.numel(), grad_output.shape[-1])
    return sum_segments(keys, rows, num_weights).to(grad_output.dtype)


def index_put_(
    original: Original,
    self: Tensor,
    indices: Sequence[Tensor | None],
    values: Tensor,
    accumulate: bool = False,
    unsafe: bool = False,
) -> Tensor:
    """Add the values where the indices of the first dimensions say, in their order."""
    sums = None if not accumulate or overlaps_itself(self) else _sum_put(self, indices, values)
    if sums is None:
        result: Tensor = original(self, indices, values, accumulate, unsafe)
        return result
    return self.add_(sums)


def _sum_put(self: Tensor, indices: Sequence[Tensor | None], values: Tensor) -> Tensor | None:
    """Return what to add to each place, or None for what torch's own version must answer."""
    given = [index for index in indices if index is not None]
    sizes, rest = self.shape[: len(given)], self.shape[len(given) :]
    if (
        not self.is_floating_point()
        or not given
        or len(given) < len(indices)
        or len(given) > self.dim()
        or any(index.dtype not in (torch.int32, torch.int64) for index in given)
        or values.dtype != self.dtype
        or not self.numel()
    ):
        return None
    try:
        spots = torch.broadcast_tensors(*given)
        rows = values.expand(*spots[0].shape, *rest)
    except RuntimeError:
        return None
    places = torch.zeros_like(spots[0], dtype=torch.int64)
    inside = torch.ones_like(spots[0], dtype=torch.bool)
    for spot, size in zip(spots, sizes, strict=True):
        inside = inside & (spot >= -size) & (spot < size)
        places = places * size + torch.where(spot < 0, spot + size, spot)
    if not holds(inside):
        return None
    sums = sum_segments(places.flatten(), rows.reshape(places.numel(), prod(rest)), prod(sizes))
    return sums.to(self.dtype).view(self.shape)


def _sum_slices(self: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor | None:
    """Return what to add to each place, or None for what torch's own version must answer."""
    dims = self.dim()
    if (
        not self.is_floating_point()
        or not -dims <= dim < dims
        or index.dim() != 1
        or index.dtype not in (torch.int32, torch.int64)
        or source.dtype != self.dtype
        or source.dim() != dims
        or not source.numel()
    ):
        return None
    slices = source.movedim(dim, 0)
    places = self.movedim(dim, 0)
    if slices.shape[1:] != places.shape[1:] or len(slices) != len(index):
        return None
    if not holds((index >= 0) & (index < len(places))):
        return None
    sums = sum_segments(index, slices.reshape(len(index), -1), len(places))
    return sums.to(self.dtype).view(len(places), *places.shape[1:]).movedim(0, dim)
