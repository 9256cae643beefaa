"""The gradient of ``EmbeddingBag`` in mode max; the other modes are left to torch.

torch's CUDA kernel adds the gradient of each bag to the rows that were the maximum, with atomics.
Here the sums are exact; see ``exact_sums``.
"""

import torch
from torch import Tensor

from lightning_d9m.patches.kernels.places import sum_by_index
from lightning_d9m.patches.primitives.fallback import Original, raise_as_original

_MODE_MAX = 2


def embedding_bag_dense_backward(  # noqa: PLR0913, PLR0917 - torch's arguments
    original: Original,
    grad: Tensor,
    indices: Tensor,
    offset2bag: Tensor,
    bag_size: Tensor,
    maximum_indices: Tensor,
    num_weights: int,
    scale_grad_by_freq: bool,
    mode: int,
    per_sample_weights: Tensor | None,
    padding_idx: int = -1,
) -> Tensor:
    """Return the gradient with respect to the table, of shape ``[num_weights, features]``.

    Args:
        original: Torch's kernel.
        grad: Of shape ``[bags, features]``.
        indices: The rows in the bags, of shape ``[entries]``.
        offset2bag: The bag of each entry.
        bag_size: The number of entries of each bag.
        maximum_indices: The row of the maximum, for each bag and feature.
        num_weights: Rows of the table.
        scale_grad_by_freq: Not for mode max.
        mode: 0 sum, 1 mean, 2 max.
        per_sample_weights: Not for mode max.
        padding_idx: A row that the bags skip, or -1.
    """
    bags = (grad, indices, offset2bag, bag_size, maximum_indices)
    arguments = (*bags, num_weights, scale_grad_by_freq, mode, per_sample_weights, padding_idx)
    if mode != _MODE_MAX:
        result: Tensor = original(*arguments)
        return result
    if (
        per_sample_weights is not None
        or scale_grad_by_freq
        or grad.dim() != 2  # noqa: PLR2004 - a number of dimensions
        or maximum_indices.shape != grad.shape
        or bag_size.shape != grad.shape[:1]
    ):
        raise_as_original(original, *arguments)
    index = torch.where((bag_size > 0).unsqueeze(1), maximum_indices, -1)
    return sum_by_index(index[None], grad[None], num_weights, grad.dtype).squeeze(0)
