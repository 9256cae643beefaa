"""The order of the samples depends on (seed, fit, rank, epoch) alone."""

import numpy as np
import pytest
import torch
from control.drawing import (
    SIZE,
    Draws,
    begin,
    epochs,
    make,
    order,
)
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
)


class Dealer:
    """A user's own batch sampler, which deals the batches of one order out to two ranks."""

    def __init__(self, rank):
        self.rank = rank
        self.sampler = RandomSampler(range(SIZE))

    def __iter__(self):
        return iter(list(BatchSampler(self.sampler, 2, drop_last=False))[self.rank :: 2])


def wrap(sampler):
    from lightning.fabric.utilities.distributed import DistributedSamplerWrapper

    def load(rank):
        wrapper = DistributedSamplerWrapper(
            sampler(range(SIZE)), num_replicas=2, rank=rank, shuffle=False
        )
        return make(shuffle=False, sampler=wrapper)

    return load


LOADERS = {
    "DistributedSampler": lambda rank: make(
        shuffle=False, sampler=DistributedSampler(range(SIZE), 2, rank)
    ),
    "Lightning's wrapper": wrap(RandomSampler),
    "Lightning's wrapper, in order": wrap(SequentialSampler),
    "a batch sampler of the user's": lambda rank: DataLoader(Draws(), batch_sampler=Dealer(rank)),
}


@pytest.mark.parametrize("name", LOADERS)
def test_ranks_share_out_one_order(name):
    def found(rank, seed=1):
        return order(epochs(LOADERS[name](rank), seed=seed, rank=rank))

    for first, second in zip(found(0), found(1), strict=True):
        assert sorted(first + second) == list(range(SIZE))
    assert found(0) == found(0)
    assert (found(0) == found(0, seed=2)) == name.endswith("in order")


class Peculiar(RandomSampler):
    """A sampler with a generator of NumPy's, or one that cannot be set."""

    @property
    def generator(self):
        return self.own

    @generator.setter
    def generator(self, value):
        if value is not None:
            raise AttributeError("read-only")


@pytest.mark.parametrize(
    "own", [None, np.random.default_rng(3), torch.Generator()], ids=["none", "numpy", "torch"]
)
def test_a_generator_that_is_not_torchs_or_cannot_be_set_is_left_alone(own):
    sampler = Peculiar(range(SIZE))
    sampler.own = own
    loader = make(shuffle=False, sampler=sampler)
    control = begin(loader, 0)
    assert sampler.generator is own
    control.release()
    assert sampler.generator is own
