"""Sums by index into a new tensor: ``embedding_bag``, ``bincount`` with weights, and ``histc``.

torch's CUDA kernels add with atomics. Here sums are exact, see ``exact_sums``, and ``histc`` counts
integers.
"""

import math
from typing import Any

import torch
from torch import Tensor

from lightning_d9m.patches.arguments import require
from lightning_d9m.patches.kernels.places import sum_by_index

_MODE_MAX = 2


def embedding_bag_dense_backward(  # noqa: PLR0913, PLR0917 - torch's arguments
    grad: Tensor,
    indices: Tensor,  # noqa: ARG001 - the rows in the bags
    offset2bag: Tensor,  # noqa: ARG001 - the bag of each entry
    bag_size: Tensor,
    maximum_indices: Tensor,
    num_weights: int,
    scale_grad_by_freq: bool,
    mode: int,
    per_sample_weights: Tensor | None,
    padding_idx: int = -1,  # noqa: ARG001 - a row that the bags skip
) -> Any:
    """Return the gradient with respect to the table, of shape ``[num_weights, features]``.

    Only that of mode max varies. ``maximum_indices`` has the row of the maximum for each bag and
    feature, and ``bag_size`` the number of entries of each bag.
    """
    if mode != _MODE_MAX:
        return NotImplemented
    require(
        per_sample_weights is None,
        not scale_grad_by_freq,
        grad.dim() == 2,  # noqa: PLR2004 - a number of dimensions
        maximum_indices.shape == grad.shape,
        bag_size.shape == grad.shape[:1],
    )
    index = torch.where((bag_size > 0).unsqueeze(1), maximum_indices, -1)
    return sum_by_index(index[None], grad[None], num_weights, grad.dtype).squeeze(0)


def bincount(self: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Any:
    """Add the weights of equal values.

    The host waits for the smallest and the greatest value, which sizes the result, as in torch.
    """
    if weights is None or (self.dim() == 1 and not self.numel() and minlength >= 0):
        return NotImplemented  # integers are counted exactly in any order
    require(
        self.dim() == 1,
        self.dtype != torch.bool,
        not (self.is_floating_point() or self.is_complex()),
        weights.shape == self.shape,
        minlength >= 0,
    )
    low, high = torch.stack(torch.aminmax(self)).tolist()
    require(low >= 0)
    terms = weights if weights.dtype == torch.float32 else weights.to(torch.float64)
    count = int(max(high + 1, minlength))
    return sum_by_index(self, terms.view(1, -1, 1), count, terms.dtype).flatten()


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
