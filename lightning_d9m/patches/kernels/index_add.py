"""``index_add``, accumulating ``index_put`` and the gradient of ``Embedding``: rows added by index.

torch has deterministic versions, which sort by index and then go through the duplicates of a place
one after the other. The sums of these kernels are exact, in any order; see ``exact_sums``.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_d9m.patches.kernels.places import add_to_places, sum_by_index
from lightning_d9m.patches.primitives.fallback import Original, holds
from lightning_d9m.patches.primitives.segment_reduce import Update, accumulation_dtype


def index_add(
    original: Original, self: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: float = 1
) -> Tensor | Update:
    """Add the source's slices where the index says."""
    if not _can_add_slices(self, dim, index, source):
        result: Tensor = original(self, dim, index, source, alpha=alpha)
        return result
    if alpha != 1:
        source = source.to(accumulation_dtype(source.dtype)) * alpha
    sizes, slices = self.shape[dim : dim + 1 or None], source.movedim(dim, 0)
    return Update(lambda target: add_to_places(target.movedim(dim, 0), sizes, index, slices))


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
    rows = grad_output.reshape(1, keys.numel(), grad_output.shape[-1])
    return sum_by_index(keys, rows, num_weights, grad_output.dtype).squeeze(0)


def index_put(
    original: Original,
    self: Tensor,
    indices: Sequence[Tensor | None],
    values: Tensor,
    accumulate: bool = False,
    unsafe: bool = False,
) -> Tensor | Update:
    """Add the values where the indices of the first dimensions say."""
    update = _plan_put(self, indices, values) if accumulate else None
    if update is None:
        result: Tensor = original(self, indices, values, accumulate, unsafe)
        return result
    return update


def _plan_put(self: Tensor, indices: Sequence[Tensor | None], values: Tensor) -> Update | None:
    """Return the addition, or None if torch's own version must handle the arguments."""
    given = [index for index in indices if index is not None]
    sizes, rest = self.shape[: len(given)], self.shape[len(given) :]
    if (
        not (self.is_floating_point() or self.is_complex())
        or not given
        or len(given) < len(indices)
        or len(given) > self.dim()
        or any(index.dtype not in (torch.int32, torch.int64) for index in given)
        or values.dtype != self.dtype
        or not self.numel()
    ):
        return None
    try:
        indexes = torch.broadcast_tensors(*given)
        rows = values.expand((*indexes[0].shape, *rest))
    except RuntimeError:
        return None
    if not rows.numel():
        return None
    keys = torch.zeros_like(indexes[0], dtype=torch.int64)
    inside = torch.ones_like(indexes[0], dtype=torch.bool)
    for index, size in zip(indexes, sizes, strict=True):
        inside = inside & (index >= -size) & (index < size)
        keys = keys * size + torch.where(index < 0, index + size, index)
    if not holds(inside):
        return None
    rows = rows.reshape(keys.numel(), *rest)
    return Update(lambda target: add_to_places(target, sizes, keys.flatten(), rows))


def _can_add_slices(self: Tensor, dim: int, index: Tensor, source: Tensor) -> bool:
    dims = self.dim()
    if (
        not (self.is_floating_point() or self.is_complex())
        or not -dims <= dim < dims
        or index.dim() != 1
        or index.dtype not in (torch.int32, torch.int64)
        or source.dtype != self.dtype
        or source.dim() != dims
        or not source.numel()
    ):
        return False
    slices, places = source.movedim(dim, 0), self.movedim(dim, 0)
    return (
        slices.shape[1:] == places.shape[1:]
        and len(slices) == len(index)
        and holds((index >= 0) & (index < len(places)))
    )
