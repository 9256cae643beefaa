"""A plugin of pytest: each Trainer on one process of a CPU has several logical ranks.

``lightning_suite.py --logical-ranks 2`` loads it. All logical ranks get the same samples, so the
numbers of batches are those without them, and the mean of two equal gradients has their bits. The
samples keep their order, which Lightning shuffles for strategies of several processes. A Trainer
that names another strategy or several devices keeps it.
"""

import functools
import inspect
import os
from collections.abc import Iterator
from importlib import import_module
from typing import Any

from torch.utils.data.distributed import DistributedSampler

from lightning_d9m import DDPDeterministicStrategy
from lightning_d9m.engine.control.data.resumable_sampler import MicroBatchIndices
from lightning_d9m.integrations.strategies.steps import loaders

RANKS = int(os.environ["SUITE_LOGICAL_RANKS"])
# The arguments that leave the choice to Lightning, or say what it chooses on a CPU.
_CHOSEN = {
    "strategy": ("auto",),
    "devices": ("auto", 1, "1"),
    "num_nodes": (1,),
    "accelerator": ("auto", "cpu"),
}


class SameBatches(loaders.BlockBatchSampler):
    """Gives each logical rank all samples."""

    def __len__(self) -> int:
        return len(self._batch(range(len(self.sampler))))

    def __iter__(self) -> Iterator[MicroBatchIndices]:
        if isinstance(self.sampler, DistributedSampler):
            self.sampler.shuffle = False
        for indices in self._batch(list(self.sampler)):
            yield MicroBatchIndices([indices] * len(self.block), self.block.start)


def pytest_configure() -> None:
    """Replace the loaders of logical ranks, and wrap the constructor of the Trainer."""
    loaders.BlockBatchSampler = SameBatches  # type: ignore[misc] # for the time of the tests
    trainer = import_module("lightning.pytorch").Trainer
    original = trainer.__init__
    signature = inspect.signature(original)

    @functools.wraps(original)
    def construct(self: Any, *args: Any, **words: Any) -> None:
        given = signature.bind(self, *args, **words).arguments
        if all(given.get(name, values[0]) in values for name, values in _CHOSEN.items()):
            words["strategy"] = DDPDeterministicStrategy(logical_ranks=RANKS)
        original(self, *args, **words)

    trainer.__init__ = construct
