"""DataLoaders whose batches hold one micro-batch for each logical rank of a process.

One pool of workers loads them all, and one batch of the loader is one training step.
"""

import copy
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler
from torch.utils.data.distributed import DistributedSampler

from lightning_d9m.engine.control.data.resumable_sampler import MicroBatchIndices
from lightning_d9m.engine.state.state import find_generators
from lightning_d9m.errors import SettingError
from lightning_d9m.integrations.strategies.sums.tree import Blocks
from lightning_d9m.integrations.trainer.lightning_private import replace_batch_sampler

_END = object()


def group_loader(loader: object, blocks: Blocks, process: int, *, padded: bool) -> Any:
    """Return a copy of a loader that gives ``MicroBatches``.

    The sampler of the loader gives the samples of all processes. If ``padded``, the logical
    ranks get equally many samples; otherwise none is repeated.

    Raises:
        SettingError: If the samples cannot be split among logical ranks.
    """
    grouped = _check_loader(loader)
    sampler, drop_last = _find_order(grouped.batch_sampler.sampler)
    if not padded and len(sampler) <= (first := blocks.of(blocks.processes - 1).start):
        raise SettingError(
            f"There are {len(sampler)} samples, and the last of {blocks.processes} processes "
            f"begins with logical rank {first}, for which none is left: predict with fewer "
            "processes."
        )

    def group(batch_sampler: Any) -> BlockBatchSampler:
        # A copy, as the program may iterate its loader elsewhere, too.
        whole = _replace_sampler(batch_sampler, batch_sampler.sampler, sampler)
        block = blocks.of(process)
        return BlockBatchSampler(
            whole, block, blocks.logical_ranks, padded=padded, drop_last=drop_last
        )

    duplicate = copy.copy(grouped)
    for name, value in (
        # The iterator of persistent workers loads for the old batch sampler.
        ("_iterator", None),
        ("sampler", sampler),
        ("batch_sampler", replace_batch_sampler(grouped.batch_sampler, group)),
    ):
        # A DataLoader does not allow to set these after construction.
        object.__setattr__(duplicate, name, value)
    return duplicate


def _find_order(sampler: Any) -> tuple[Any, bool]:
    """Return a sampler of all samples, and whether the last ones are dropped."""
    if sampler.num_replicas == 1:
        return sampler, sampler.drop_last
    # The program has made it for the number of processes. One of torch is made again for all
    # samples, from the same seed; nobody knows how to do so for another class.
    if type(sampler) is not DistributedSampler:
        raise SettingError(
            f"The sampler {type(sampler).__name__} splits the samples among "
            f"{sampler.num_replicas} processes itself: build it with num_replicas=1 and "
            "rank=0, so that logical ranks split the whole order, or let Lightning add its "
            "sampler."
        )
    words: Any = {"shuffle": sampler.shuffle, "seed": sampler.seed}
    whole: Any = DistributedSampler(sampler.dataset, num_replicas=1, rank=0, **words)
    return whole, sampler.drop_last


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
    # Workers copy a dataset with its generators, and how often each copy draws depends on the
    # number of batches that a worker loads.
    if kept := find_generators({"dataset": loader.dataset, "collate_fn": loader.collate_fn}):
        raise SettingError(
            f"The loader of {name} draws from its own generators ({', '.join(kept)}), whose draws "
            "depend on how many logical ranks a process has. Draw from the generators of Python, "
            "NumPy or torch, which are seeded for each batch."
        )
    return loader


class BlockBatchSampler:
    """Batches of a process's logical ranks, all split from one order of the samples.

    Logical rank ``v`` of ``V`` gets the samples ``v``, ``v + V``, ``v + 2 * V`` and so on of the
    order, as ``DistributedSampler`` splits it.

    Args:
        batch_sampler: Makes batches of the order of its ``sampler``. A copy of it makes the batches
            of each logical rank.
        block: The logical ranks of this process.
        logical_ranks: The number of all logical ranks.
        padded: Repeat the first samples until every logical rank has equally many, as
            ``DistributedSampler`` does in training and evaluation; otherwise the first logical
            ranks have one sample more.
        drop_last: Drop the last samples instead of repeating the first.
    """

    def __init__(
        self,
        batch_sampler: Any,
        block: range,
        logical_ranks: int,
        *,
        padded: bool = True,
        drop_last: bool = False,
    ) -> None:
        self.batch_sampler = batch_sampler
        self.sampler = batch_sampler.sampler
        self.batch_size = getattr(batch_sampler, "batch_size", None)  # of a micro-batch
        self.block = block
        self._logical_ranks = logical_ranks
        self._padded = padded
        self._drops_samples = drop_last

    def __len__(self) -> int:
        total = self._count_used(len(self.sampler))
        # Processes must find the same number, unless they may predict different numbers of batches.
        ranks = range(self._logical_ranks) if self._padded else self.block
        return max(len(self._batch(range(rank, total, self._logical_ranks))) for rank in ranks)

    def __iter__(self) -> Iterator[MicroBatchIndices]:
        order = list(self.sampler)
        total = self._count_used(len(order))
        while order and len(order) < total:
            order += order[: total - len(order)]
        # The numbers of batches of a user's class may depend on the samples, and its draws on the
        # batches that it makes. So every process makes those of all logical ranks: it finds the
        # same draws, and the same error at the same step.
        ranks = range(self._logical_ranks)
        batches = [self._make(order[rank : total : self._logical_ranks]) for rank in ranks]
        for parts in zip_longest(*batches, fillvalue=_END):
            made = [part for part in parts if part is not _END]
            # Without padding the first ranks have one batch more.
            is_cut = any(part is _END for part in parts[: len(made)])
            if is_cut or (self._padded and len(made) < len(parts)):
                raise SettingError(
                    "The logical ranks have different numbers of batches of "
                    f"{type(self.batch_sampler).__name__}, and a step needs one of each: make as "
                    "many batches of any equally long list of samples."
                )
            if own_parts := made[self.block.start : self.block.stop]:
                yield MicroBatchIndices(own_parts, self.block.start)

    def _count_used(self, samples: int) -> int:
        """Return the number of samples that the logical ranks share."""
        ranks = self._logical_ranks
        if not self._padded:
            return samples
        return samples // ranks * ranks if self._drops_samples else -(-samples // ranks) * ranks

    def _batch(self, samples: Sequence[Any]) -> Any:
        # A class of the program is kept, whatever its rules, and only its sampler is replaced by
        # the samples of one logical rank.
        return _replace_sampler(self.batch_sampler, self.sampler, samples)

    def _make(self, samples: Sequence[Any]) -> Iterator[Any]:
        """Yield the batches of a logical rank.

        Raises:
            SettingError: If one has a sample of another logical rank.
        """
        # torch's own batch sampler reads no other samples.
        known = None if type(self.batch_sampler) is BatchSampler else frozenset(samples)
        for batch in self._batch(samples):
            if known is not None and isinstance(batch, list | tuple):
                for sample in batch:
                    if isinstance(sample, int) and sample not in known:
                        raise SettingError(
                            f"{type(self.batch_sampler).__name__} puts sample {sample} into a "
                            "batch of a logical rank that does not have it: read the samples from "
                            "the argument sampler in __iter__, not in __init__, so that logical "
                            "ranks can split them."
                        )
            yield batch


def _replace_sampler(holder: Any, sampler: Any, samples: Any, above: Sequence[Any] = ()) -> Any:
    """Return a copy of a batch sampler that has samples wherever it holds a sampler.

    It may hold it under several names, and in other samplers. All else is shared with the copy.
    ``above`` are the samplers that hold this one: if it holds one of them, that stays as it is.
    """
    replaced, above = {}, (*above, holder)
    for name, value in vars(holder).items():
        made = samples if value is sampler else value
        if isinstance(made, Sampler) and made is value and not any(made is own for own in above):
            made = _replace_sampler(value, sampler, samples, above)
        if made is not value:
            replaced[name] = made
    if not replaced:
        return holder
    duplicate = copy.copy(holder)
    vars(duplicate).update(replaced)
    return duplicate
