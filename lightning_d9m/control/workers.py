# ruff: noqa: SLF001 - torch has no public word for the workers of a loader
"""Long-lived workers of a loader, which outlast an epoch."""

from typing import Any

from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter


def drain_workers(loader: Any) -> None:
    """Let workers finish what they were asked for and nobody took, where an epoch was cut short.

    They would meet the new epoch amid samples of the old one otherwise, at a moment that timing
    decides, and draw on from there. torch waits for the same when it makes the next iterator.
    """
    iterator = loader._iterator
    if isinstance(iterator, _MultiProcessingDataLoaderIter):
        while iterator._tasks_outstanding > 0 and not iterator._shutdown:
            iterator._get_data()
            iterator._tasks_outstanding -= 1
    else:
        # Whoever made this kind knows how to wait for it: the next epoch starts new workers.
        loader._iterator = None
