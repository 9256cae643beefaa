"""Counting and adding by bin: ``histc`` of floating point and ``bincount`` with weights.

torch's CUDA kernels add to a bin with atomics, in the dtype of the result.
"""

import math

import torch
from torch import Tensor

from lightning_d9m.patches.kernels.places import sum_by_index
from lightning_d9m.patches.primitives.fallback import Original, raise_as_original


def histc(
    original: Original,
    self: Tensor,
    bins: int = 100,
    min: float = 0,  # noqa: A002 - torch's name
    max: float = 0,  # noqa: A002 - torch's name
) -> Tensor:
    """Count the elements in each of ``bins`` bins of equal width.

    Elements are counted as integers, so a bin may hold more than the dtype can count one by one.
    For the default range the host waits for the smallest and the greatest element, as in torch.
    """
    arguments = (self, bins, min, max)
    if not self.is_floating_point() or (bins > 0 and not self.numel() and min <= max):
        result: Tensor = original(*arguments)  # integers are counted exactly in any order
        return result
    low, high = _round(min, self.dtype), _round(max, self.dtype)
    if bins > 0 and low == high:
        low, high = (float(bound) for bound in torch.stack(torch.aminmax(self)).tolist())
    if low == high:
        low, high = low - 1, high + 1
    if bins <= 0 or not math.isfinite(low) or not math.isfinite(high) or low > high:
        raise_as_original(original, *arguments)
    values = self.flatten()
    # A tensor on the device: CUDA multiplies by the reciprocal of a number, which rounds twice.
    span = torch.full((), _round(high - low, self.dtype), dtype=self.dtype, device=self.device)
    places = ((values - low) * bins / span).to(torch.int32).clamp_(max=bins - 1)
    inside = (values >= low) & (values <= high)
    places = torch.where(inside, places, bins)
    bounds = torch.arange(bins + 1, dtype=torch.int32, device=self.device)
    return torch.searchsorted(places.sort(stable=True).values, bounds).diff().to(self.dtype)


def bincount(
    original: Original, self: Tensor, weights: Tensor | None = None, minlength: int = 0
) -> Tensor:
    """Add the weights of equal values.

    The host waits for the smallest and the greatest value, which sizes the result, as in torch.
    """
    arguments = (self, weights, minlength)
    if weights is None or (self.dim() == 1 and not self.numel() and minlength >= 0):
        result: Tensor = original(*arguments)  # integers are counted exactly in any order
        return result
    if (
        self.dim() != 1
        or self.dtype == torch.bool
        or self.is_floating_point()
        or self.is_complex()
        or weights.shape != self.shape
        or minlength < 0
    ):
        raise_as_original(original, *arguments)
    low, high = torch.stack(torch.aminmax(self)).tolist()
    if low < 0:
        raise_as_original(original, *arguments)
    terms = weights if weights.dtype == torch.float32 else weights.to(torch.float64)
    count = int(max(high + 1, minlength))
    return sum_by_index(self, terms.view(1, -1, 1), count, terms.dtype).flatten()


def _round(number: float, dtype: torch.dtype) -> float:
    return float(torch.tensor(number, dtype=dtype, device="cpu"))
