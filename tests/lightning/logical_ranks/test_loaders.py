"""Batches of a block of logical ranks are split from one order of the samples."""

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, RandomSampler
from torch.utils.data.distributed import DistributedSampler

from lightning_d9m import SettingError
from lightning_d9m.control.data.loaders import LoaderControl
from lightning_d9m.control.data.resumable_sampler import MicroBatches
from lightning_d9m.lightning.logical_ranks.loaders import BlockBatchSampler


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


class LongerForTheSecond(BatchSampler):
    """Makes more batches of samples that begin with an odd one."""

    def __iter__(self):
        batches = list(super().__iter__())
        return iter(batches + batches[: batches[0][0] % 2])


@pytest.mark.parametrize("block", [range(2), range(1), range(1, 2)])
def test_unequal_numbers_of_batches_are_refused_by_every_process(block):
    whole = LongerForTheSecond(range(12), 2, drop_last=False)
    batches = iter(BlockBatchSampler(whole, block, 2))
    for _ in range(3):
        assert next(batches).first == block.start
    with pytest.raises(SettingError, match=r"ranks 0 to 1 have .* batches of LongerForTheSecond"):
        next(batches)


class Shuffled(BatchSampler):
    """Makes batches in an order that it draws."""

    def __iter__(self):
        batches = list(super().__iter__())
        return iter([batches[at] for at in torch.randperm(len(batches)).tolist()])


@pytest.mark.parametrize("padded", [False, True])
def test_what_a_batch_sampler_draws_does_not_depend_on_the_number_of_processes(padded):
    found = {}
    for processes in (1, 2, 4):
        for process in range(processes):
            block = range(process * 4 // processes, (process + 1) * 4 // processes)
            torch.manual_seed(1)
            whole = Shuffled(range(22), 2, drop_last=False)
            groups = list(BlockBatchSampler(whole, block, 4, padded=padded))
            for place, rank in enumerate(block):
                batches = [group[place] for group in groups if place < len(group)]
                assert found.setdefault(rank, batches) == batches
    assert found[0] != sorted(found[0])


class LongerForFewIndices(BatchSampler):
    """Counts one batch more for samples that begin with the first."""

    def __len__(self):
        return super().__len__() + (next(iter(self.sampler)) == 0)


def test_every_process_finds_the_same_number_of_batches():
    whole = LongerForFewIndices(range(12), 2, drop_last=False)
    assert [len(BlockBatchSampler(whole, range(r, r + 1), 2)) for r in (0, 1)] == [4, 4]


def draw(samples):
    """Draw from all generators for each sample of a batch."""
    return [(sample, random.random(), float(torch.rand(()))) for sample in samples]


def load(block, workers, *, skip=0):
    """Return the micro-batches of two epochs, by logical rank."""
    control = LoaderControl(3, fit=0, rank=0, per_sample_rng=False)
    order = RandomSampler(range(22))
    batches = BlockBatchSampler(BatchSampler(order, 2, drop_last=False), block, 4)
    loader = DataLoader(range(22), num_workers=workers, collate_fn=draw)
    object.__setattr__(loader, "batch_sampler", batches)
    loader = control.wrap_loader(loader, "train")
    found = {rank: [] for rank in block}
    if skip:
        control.resume_epoch("train", 0, batches=skip, cycled=bool)
    for epoch in range(2):
        control.start_epoch("train", epoch)
        for group in loader:
            assert type(group) is MicroBatches
            for rank, batch in zip(block, group, strict=True):
                found[rank].append(batch)
    control.release()
    return found


def test_what_a_logical_rank_draws_depends_on_no_other():
    """Nor on workers; an epoch continues after the steps that were consumed."""
    together = load(range(4), 0)
    for block, workers in ((range(4), 1), (range(2), 0), (range(1, 3), 1), (range(3, 4), 0)):
        assert load(block, workers) == {rank: together[rank] for rank in block}
    assert load(range(1, 3), 0, skip=2) == {rank: together[rank][2:] for rank in (1, 2)}
