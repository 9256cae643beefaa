"""Batches of a block of logical ranks are split from one order of the samples."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader
from torch.utils.data.distributed import DistributedSampler

from lightning_d9m.errors import SettingError
from lightning_d9m.integrations.strategies.steps.loaders import BlockBatchSampler, group_loader
from lightning_d9m.integrations.strategies.sums.tree import Blocks


@given(
    samples=st.integers(1, 60),
    ranks=st.integers(1, 9),
    processes=st.integers(1, 9),
    batch_size=st.integers(1, 4),
    drop_last=st.booleans(),
    data=st.data(),
)
def test_each_logical_rank_gets_the_batches_of_a_distributed_sampler(
    samples, ranks, processes, batch_size, drop_last, data
):
    drop_samples = data.draw(st.booleans()) and samples >= ranks
    processes = min(processes, ranks)
    found = {rank: [] for rank in range(ranks)}
    lengths = set()
    for process in range(processes):
        block = range(process * ranks // processes, (process + 1) * ranks // processes)
        whole = BatchSampler(range(samples), batch_size, drop_last)
        grouped = BlockBatchSampler(whole, block, ranks, drop_last=drop_samples)
        groups = list(grouped)
        lengths |= {len(grouped), len(groups)}
        for group in groups:
            assert group.first == block.start
            for rank, indices in zip(block, group, strict=True):
                found[rank].append(indices)
    assert len(lengths) == 1
    for rank in range(ranks):
        sampler = DistributedSampler(
            range(samples), ranks, rank, shuffle=False, drop_last=drop_samples
        )
        assert found[rank] == list(BatchSampler(sampler, batch_size, drop_last))


@given(samples=st.integers(0, 40), ranks=st.integers(1, 7), batch_size=st.integers(1, 3))
def test_without_padding_every_sample_occurs_once(samples, ranks, batch_size):
    whole = BatchSampler(range(samples), batch_size, drop_last=False)
    groups = list(BlockBatchSampler(whole, range(ranks), ranks, padded=False))
    indices = [index for group in groups for batch in group for index in batch]
    assert sorted(indices) == list(range(samples))


class Own(BatchSampler):
    """Draws the order of its batches, and counts one more for samples that begin with the first."""

    def __iter__(self):
        batches = list(super().__iter__())
        return iter([batches[at] for at in torch.randperm(len(batches)).tolist()])

    def __len__(self):
        return super().__len__() + (next(iter(self.sampler)) == 0)


@pytest.mark.parametrize("padded", [False, True])
def test_what_a_batch_sampler_draws_does_not_depend_on_the_number_of_processes(padded):
    """With padding they count the same number of batches, too."""
    found, lengths = {}, set()
    for processes in (1, 2, 4):
        for process in range(processes):
            block = range(process * 4 // processes, (process + 1) * 4 // processes)
            torch.manual_seed(1)
            whole = BlockBatchSampler(Own(range(22), 2, drop_last=False), block, 4, padded=padded)
            groups = list(whole)
            lengths.add(len(whole))
            for place, rank in enumerate(block):
                batches = [group[place] for group in groups if place < len(group)]
                assert found.setdefault(rank, batches) == batches
    assert found[0] != sorted(found[0])
    assert lengths == {4} if padded else {3, 4}


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_sampler_for_any_number_of_processes_keeps_drop_last(replicas, drop_last):
    """Of 10 samples, 4 logical ranks drop 2 or repeat 2."""
    sampler = DistributedSampler(range(10), replicas, 0, drop_last=drop_last)
    loader = DataLoader(range(10), batch_size=1, sampler=sampler)
    grouped = group_loader(loader, Blocks(4, replicas), 0, padded=True)
    assert len(grouped.batch_sampler) == (2 if drop_last else 3)


class Inner(BatchSampler):
    """Sorts the batches of another batch sampler, which has the sampler, too."""

    def __init__(self, sampler, batch_size, drop_last):
        super().__init__(sampler, batch_size, drop_last)
        self.inner = BatchSampler(sampler, batch_size, drop_last)
        self.inner.outer = self  # they hold each other

    def __iter__(self):
        return map(sorted, self.inner)

    def __len__(self):
        return len(self.inner)


class Early(BatchSampler):
    """Reads its sampler once."""

    def __init__(self, sampler, batch_size, drop_last):
        super().__init__(sampler, batch_size, drop_last)
        self.order = list(sampler)

    def __iter__(self):
        return iter(BatchSampler(self.order, self.batch_size, self.drop_last))


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_sampler_is_replaced_under_all_its_names(replicas):
    sampler = DistributedSampler(range(16), replicas, 0)
    loader = DataLoader(range(16), batch_sampler=Inner(sampler, 2, drop_last=False))
    grouped = group_loader(loader, Blocks(4, 1), 0, padded=True).batch_sampler
    groups = list(grouped)
    assert len(groups) == len(grouped) == 2
    assert sorted(each for group in groups for batch in group for each in batch) == [*range(16)]
    assert loader.batch_sampler.inner.sampler is sampler


def test_a_batch_sampler_that_does_not_split_its_samples_is_refused():
    loader = DataLoader(
        range(16), batch_sampler=Early(DistributedSampler(range(16), 1, 0), 2, False)
    )
    with pytest.raises(SettingError, match=r"Early puts sample .* does not have it"):
        list(group_loader(loader, Blocks(4, 1), 0, padded=True).batch_sampler)
