"""Order statistics together with their indices: the median along a dimension, and ``topk``.

torch's CUDA kernels return the index of whichever of several equal elements a thread finds. Here
it is the one that a stable sort puts there.
"""

import torch
from torch import Tensor

from lightning_d9m.patches.primitives.fallback import Original, raise_as_original


def median_dim(
    original: Original, self: Tensor, dim: int, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the lower median and its index; NaN and the first NaN's index where there is one."""
    return _median(original, self, dim, keepdim, ignore_nan=False)


def nanmedian_dim(
    original: Original, self: Tensor, dim: int, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the lower median of what is not NaN, and its index."""
    return _median(original, self, dim, keepdim, ignore_nan=True)


def topk(
    original: Original,
    self: Tensor,
    k: int,
    dim: int = -1,
    largest: bool = True,
    sorted: bool = True,  # noqa: A002 - torch's name
) -> tuple[Tensor, Tensor]:
    """Return the k greatest or smallest elements and their indices, the first of equals first."""
    dims = max(self.dim(), 1)
    if (
        not -dims <= dim < dims
        or not 0 <= k <= (self.shape[dim] if self.dim() else 1)
        or self.dtype == torch.bool
        or self.is_complex()
    ):
        raise_as_original(original, self, k, dim, largest, sorted)
    if not self.dim():
        return self.clone(), torch.zeros((), dtype=torch.int64, device=self.device)
    values, indices = torch.sort(self, dim=dim, descending=largest, stable=True)
    first = (part.narrow(dim, 0, k) for part in (values, indices))
    values, indices = (part.clone(memory_format=torch.contiguous_format) for part in first)
    return values, indices


def _median(
    original: Original, self: Tensor, dim: int, keepdim: bool, *, ignore_nan: bool
) -> tuple[Tensor, Tensor]:
    dims = max(self.dim(), 1)
    if (
        not -dims <= dim < dims
        or self.dtype == torch.bool
        or self.is_complex()
        or (self.dim() and not self.shape[dim])
    ):
        raise_as_original(original, self, dim, keepdim)
    rows = self if self.dim() else self.unsqueeze(0)
    ordered, indices = torch.sort(rows, dim=dim, stable=True)  # NaNs come last, in their order
    size = rows.shape[dim]
    if self.is_floating_point():
        numbers = size - ordered.isnan().sum(dim, keepdim=True)
        if ignore_nan:
            place = torch.div(numbers - 1, 2, rounding_mode="floor").clamp_(min=0)
        else:
            place = torch.where(numbers < size, numbers, (size - 1) // 2)
        chosen = ordered.gather(dim, place), indices.gather(dim, place)
    else:
        middle = (size - 1) // 2
        chosen = ordered.narrow(dim, middle, 1), indices.narrow(dim, middle, 1)
    values, places = (part if keepdim and self.dim() else part.squeeze(dim) for part in chosen)
    return values.contiguous(), places.contiguous()
