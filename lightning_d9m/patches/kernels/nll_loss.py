"""The 2-D negative log likelihood loss, reduced over all pixels.

torch's CUDA kernel adds the blocks' partial sums with atomics. Here the terms are stored and
summed by torch's reduction, whose tree depends on the shape only.
"""

import torch
from torch import Tensor

from lightning_d9m.patches.primitives.fallback import Original, raise_as_original
from lightning_d9m.patches.primitives.segment_reduce import accumulation_dtype

_NONE, _MEAN = 0, 1


def nll_loss2d_forward(
    original: Original,
    self: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
) -> tuple[Tensor, Tensor]:
    """Return the loss and the total weight, both scalars; torch's own result without a reduction.

    The loss is ``-sum(weight[t] * self[n, t, h, w])``, for the mean divided by ``sum(weight[t])``,
    over the pixels whose target t is not ``ignore_index``.
    """
    arguments = (self, target, weight, reduction, ignore_index)
    if reduction == _NONE:
        result: tuple[Tensor, Tensor] = original(*arguments)  # one thread per output: no race
        return result
    if (
        self.dim() != 4  # noqa: PLR2004 - a number of dimensions
        or target.shape != (self.shape[0], *self.shape[2:])
        or target.dtype != torch.int64
        or not self.is_floating_point()
        or (weight is not None and (weight.shape != self.shape[1:2] or weight.dtype != self.dtype))
    ):
        raise_as_original(original, *arguments)
    dtype = accumulation_dtype(self.dtype)
    counted = target != ignore_index
    classes = torch.where(counted, target, 0)
    try:
        chosen = self.gather(1, classes.unsqueeze(1)).squeeze(1).to(dtype)
    except (IndexError, RuntimeError):
        raise_as_original(original, *arguments)  # a target is not a class
    if weight is None:
        total_weight = counted.sum().to(dtype)
        loss = torch.where(counted, -chosen, 0).sum()
    else:
        factors = weight.to(dtype).index_select(0, classes.flatten()).view_as(chosen)
        total_weight = torch.where(counted, factors, 0).sum()
        loss = torch.where(counted, -chosen * factors, 0).sum()
    if reduction == _MEAN:
        loss = loss / total_weight
    return loss.to(self.dtype), total_weight.to(self.dtype)
