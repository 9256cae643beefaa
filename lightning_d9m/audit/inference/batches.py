"""The batches of ``d9m audit inference``."""

from collections.abc import Iterator

import torch


def list_batches(samples: int, size: int) -> Iterator[list[int]]:
    """Yield batches of one size that contain every sample, in three orders.

    The last batch of an order is filled with samples from its beginning.
    """
    draws = torch.Generator().manual_seed(size)
    orders = (
        list(range(samples)),
        list(reversed(range(samples))),
        torch.randperm(samples, generator=draws).tolist(),
    )
    for order in orders:
        for start in range(0, samples, size):
            yield [order[(start + place) % samples] for place in range(size)]
