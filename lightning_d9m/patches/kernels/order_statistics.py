"""The median along a dimension and its index.

torch's CUDA kernel returns the index of one of several equal elements, which depends on the order
of the threads. Here it is the first one.
"""

from functools import partial

import torch
from torch import Tensor

from lightning_d9m.patches.primitives.fallback import Original, raise_as_original


def _median(
    original: Original, self: Tensor, dim: int, keepdim: bool = False, *, ignore_nan: bool
) -> tuple[Tensor, Tensor]:
    """Return the lower median and the index of the first element that equals it.

    ``median`` returns NaN and the first NaN's index if there is a NaN; ``nanmedian`` only if there
    is nothing else.
    """
    dims = max(self.dim(), 1)
    if (
        not -dims <= dim < dims
        or self.dtype == torch.bool
        or self.is_complex()
        or (self.dim() and not self.shape[dim])
    ):
        raise_as_original(original, self, dim, keepdim)
    rows = self if self.dim() else self.unsqueeze(0)
    size = rows.shape[dim]
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


median_dim = partial(_median, ignore_nan=False)
nanmedian_dim = partial(_median, ignore_nan=True)
