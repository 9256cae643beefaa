"""DataLoaders whose batches hold one micro-batch for each logical rank of a process."""

import copy
from typing import Any

from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from lightning_d9m.errors import SettingError
from lightning_d9m.lightning.lightning_private import replace_batch_sampler
from lightning_d9m.logical_ranks.batches import BlockBatchSampler
from lightning_d9m.logical_ranks.tree import Blocks
from lightning_d9m.state.state import find_generators


def group_loader(loader: object, blocks: Blocks, process: int, *, padded: bool) -> Any:
    """Return a copy of a loader that gives ``MicroBatches``.

    The sampler of the loader gives the samples of all processes. If ``padded``, the logical
    ranks get equally many samples; otherwise none is repeated.

    Raises:
        SettingError: If the samples cannot be split among logical ranks.
    """
    grouped = _check_loader(loader)
    drop_last = False
    sampler = grouped.batch_sampler.sampler
    if sampler.num_replicas != 1:
        if type(sampler) is not DistributedSampler:
            raise SettingError(
                f"The sampler {type(sampler).__name__} splits the samples among "
                f"{sampler.num_replicas} processes itself: build it with num_replicas=1 and "
                "rank=0, so that logical ranks split the whole order, or let Lightning add its "
                "sampler."
            )
        drop_last = sampler.drop_last
        words: Any = {"shuffle": sampler.shuffle, "seed": sampler.seed}
        sampler = DistributedSampler(sampler.dataset, num_replicas=1, rank=0, **words)

    if not padded and len(sampler) <= (first := blocks.of(blocks.processes - 1).start):
        raise SettingError(
            f"There are {len(sampler)} samples, and the last of {blocks.processes} processes "
            f"begins with logical rank {first}, for which none is left: predict with fewer "
            "processes."
        )

    def group(batch_sampler: Any) -> BlockBatchSampler:
        whole = copy.copy(batch_sampler)
        whole.sampler = sampler
        block = blocks.of(process)
        return BlockBatchSampler(
            whole, block, blocks.logical_ranks, padded=padded, drop_last=drop_last
        )

    duplicate = copy.copy(grouped)
    for name, value in (
        ("_iterator", None),
        ("sampler", sampler),
        ("batch_sampler", replace_batch_sampler(grouped.batch_sampler, group)),
    ):
        # A DataLoader does not allow to set these after construction.
        object.__setattr__(duplicate, name, value)
    return duplicate


def _check_loader(loader: object) -> Any:
    if not isinstance(loader, DataLoader):
        raise SettingError(
            f"A {type(loader).__name__} loads the data, and logical ranks split the samples of a "
            "torch DataLoader: use a DataLoader, or train without logical_ranks."
        )
    name = type(loader.dataset).__name__
    if isinstance(loader.dataset, IterableDataset):
        raise SettingError(
            f"{name} is an IterableDataset, whose samples have no indices that logical ranks could "
            "split: use a dataset with __getitem__ and __len__, or train without logical_ranks."
        )
    if loader.batch_sampler is None:
        raise SettingError(
            f"The loader of {name} has batch_size=None, so its dataset makes the batches, and "
            "logical ranks cannot split them: set batch_size, or train without logical_ranks."
        )
    sampler = getattr(loader.batch_sampler, "sampler", None)
    if not isinstance(sampler, DistributedSampler):
        raise SettingError(
            f"The loader of {name} has the sampler {type(sampler).__name__}, which all processes "
            "would iterate whole: leave use_distributed_sampler=True, so that Lightning splits its "
            "samples among the logical ranks, or use torch's DistributedSampler."
        )
    if kept := find_generators({"dataset": loader.dataset, "collate_fn": loader.collate_fn}):
        raise SettingError(
            f"The loader of {name} draws from its own generators ({', '.join(kept)}), whose draws "
            "depend on how many logical ranks a process has. Draw from the generators of Python, "
            "NumPy or torch, which are seeded for each batch."
        )
    return loader
