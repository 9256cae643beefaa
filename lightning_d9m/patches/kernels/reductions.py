"""Reductions: ``nll_loss2d``, medians, scans of a single row, and histograms."""

import math
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
    require(self.is_floating_point(), weight is None or weight.dtype == self.dtype)
    dtype, counted = accumulation_dtype(self.dtype), target != ignore_index
    factors = None if weight is None else weight.to(dtype)
    losses, _ = torch.ops.aten.nll_loss2d_forward(
        self.to(dtype), target, factors, _NONE, ignore_index
    )
    if factors is not None:
        chosen = factors.index_select(0, torch.where(counted, target, 0).flatten())
        counted = torch.where(counted, chosen.view_as(target), 0)
    loss, total_weight = losses.sum(), counted.sum().to(dtype)
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


def histc(
    self: Tensor,
    bins: int = 100,
    min: float = 0,  # noqa: A002 - torch's name
    max: float = 0,  # noqa: A002 - torch's name
) -> Any:
    """Count the elements in each of ``bins`` bins of equal width.

    Elements are counted as integers, so a bin may hold more than the dtype can count one by one.
    For the default range the host waits for the smallest and the greatest element, as in torch.
    """
    if not self.is_floating_point() or (bins > 0 and not self.numel() and min <= max):
        return NotImplemented  # integers are counted exactly in any order
    low, high = _round(min, self.dtype), _round(max, self.dtype)
    if bins > 0 and low == high:
        low, high = (float(bound) for bound in torch.stack(torch.aminmax(self)).tolist())
    if low == high:
        low, high = low - 1, high + 1
    require(bins > 0, math.isfinite(low), math.isfinite(high), low <= high)
    values = self.flatten()
    # A tensor on the device: CUDA multiplies by the reciprocal of a number, which rounds twice.
    span = torch.full((), _round(high - low, self.dtype), dtype=self.dtype, device=self.device)
    places = ((values - low) * bins / span).to(torch.int32).clamp_(max=bins - 1)
    inside = (values >= low) & (values <= high)
    places = torch.where(inside, places, bins)
    bounds = torch.arange(bins + 1, dtype=torch.int32, device=self.device)
    return torch.searchsorted(places.sort(stable=True).values, bounds).diff().to(self.dtype)


def _round(number: float, dtype: torch.dtype) -> float:
    return float(torch.tensor(number, dtype=dtype, device="cpu"))
