"""Reductions along dimensions: ``nll_loss2d``, medians, and scans of a single row."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_d9m.patches.arguments import accumulation_dtype, require

_NONE, _MEAN = 0, 1


def nll_loss2d_forward(
    self: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int
) -> Any:
    """Return the loss and the total weight, both scalars; torch's own result without a reduction.

    The loss is ``-sum(weight[t] * self[n, t, h, w])``, for the mean divided by ``sum(weight[t])``,
    over the pixels whose target t is not ``ignore_index``. torch's CUDA kernel adds the partial
    sums of blocks with atomics. Here the terms are stored and summed by torch's reduction, whose
    tree depends on the shape only.
    """
    if reduction == _NONE:
        return NotImplemented  # one thread per output: no race
    require(
        self.dim() == 4,  # noqa: PLR2004 - a number of dimensions
        target.shape == (self.shape[0], *self.shape[2:]),
        target.dtype == torch.int64,
        self.is_floating_point(),
    )
    dtype = accumulation_dtype(self.dtype)
    counted = target != ignore_index
    classes = torch.where(counted, target, 0)
    chosen = self.gather(1, classes.unsqueeze(1)).squeeze(1).to(dtype)
    if weight is None:
        total_weight = counted.sum().to(dtype)
        loss = torch.where(counted, -chosen, 0).sum()
    else:
        require(weight.shape == self.shape[1:2], weight.dtype == self.dtype)
        factors = weight.to(dtype).index_select(0, classes.flatten()).view_as(chosen)
        total_weight = torch.where(counted, factors, 0).sum()
        loss = torch.where(counted, -chosen * factors, 0).sum()
    if reduction == _MEAN:
        loss = loss / total_weight
    return loss.to(self.dtype), total_weight.to(self.dtype)


def _median(
    self: Tensor, dim: int, keepdim: bool = False, *, ignore_nan: bool
) -> tuple[Tensor, Tensor]:
    """Return the lower median and the index of the first element that equals it.

    ``median`` returns NaN and the first NaN's index if there is a NaN; ``nanmedian`` only if there
    is nothing else. torch's CUDA kernel returns the index of one of several equal elements, which
    depends on the order of the threads.
    """
    dims = max(self.dim(), 1)
    require(-dims <= dim < dims, self.dtype != torch.bool, not self.is_complex())
    rows = self if self.dim() else self.unsqueeze(0)
    size = rows.shape[dim]
    require(size > 0)
    is_nan = rows.isnan()
    if ignore_nan and self.is_floating_point():
        numbers = size - is_nan.sum(dim, keepdim=True)
        middle = torch.div(numbers - 1, 2, rounding_mode="floor").clamp_(min=0)
        value = torch.sort(rows, dim=dim, stable=True).values.gather(dim, middle)
        matches = (rows == value) | (is_nan & (numbers == 0))
    else:
        # kthvalue selects without a sort, and its value does not depend on the order of threads.
        value = rows.kthvalue((size + 1) // 2, dim, keepdim=True).values
        matches = torch.where(is_nan.any(dim, keepdim=True), is_nan, rows == value)
    shape = [1] * rows.dim()
    shape[dim] = size
    ranks = torch.arange(size, device=self.device).view(shape)
    index = torch.where(matches, ranks, size - 1).amin(dim, keepdim=True)
    chosen = rows.gather(dim, index), index
    values, indices = (part if keepdim and self.dim() else part.squeeze(dim) for part in chosen)
    return values.contiguous(), indices.contiguous()


median = partial(_median, ignore_nan=False)
nanmedian = partial(_median, ignore_nan=True)


def _scan(self: Tensor, dim: int, *, scan: Callable[..., Tensor], **dtype: Any) -> Any:
    """Scan the only row of a tensor as the first of two equal ones; any other tensor as torch does.

    torch's CUDA kernel for tensors of one row is a scan of the CUB library, in which a block adds
    what the blocks before it have finished by then: the partial results depend on timing. The
    kernel for several rows scans each row within one block, in a fixed order. Integers are
    multiplied exactly, in any order.
    """
    result = dtype.get("dtype") or self.dtype
    exact = not (result.is_floating_point or result.is_complex)
    inside = -self.dim() <= dim < self.dim()
    if exact or not inside or self.numel() != self.shape[dim] or self.numel() <= 1:
        return NotImplemented
    return scan(self.reshape(1, -1).expand(2, -1), 1, **dtype)[0].view(self.shape)


cumprod = partial(_scan, scan=torch.cumprod)
logcumsumexp = partial(_scan, scan=torch.logcumsumexp)
