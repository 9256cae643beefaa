"""Loaders are taken over once a stage, given back as they were, and ordered by the seed alone."""

import gc
import multiprocessing
import time
import weakref

import numpy as np
import pytest
import torch
from control.drawing import SIZE, WORKERS, Draws, begin, epochs, make, order, rows, snapshot
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
)
from torch_features import needs_in_order

from lightning_d9m.control.data.data_state import DATA
from lightning_d9m.control.data.loaders import LoaderControl


@pytest.mark.parametrize("per_sample", [False, True])
@pytest.mark.parametrize("words", [{}, *WORKERS], ids=["none", "workers", "persistent"])
def test_everything_of_the_users_is_put_back(words, per_sample):
    loader = make(**words)
    before = snapshot(loader)
    control = begin(loader, 0, per_sample=per_sample)
    assert snapshot(loader) != before
    control.release()
    assert snapshot(loader) == before
    assert isinstance(loader.dataset, Draws)


@pytest.mark.parametrize("words", [{}, *WORKERS], ids=["none", "workers", "persistent"])
@pytest.mark.parametrize("per_sample", [False, True])
def test_one_loader_for_training_and_validation_serves_both(words, per_sample):
    """What validation draws never changes what training draws."""

    def found(validations):
        loader = make(**words)
        before = snapshot(loader)
        control = LoaderControl(1, fit=0, rank=0, per_sample_rng=per_sample)
        validate = control.wrap_loader(loader, "validate")
        train = control.wrap_loader(loader, "train")
        assert control.wrap_loader(train, "train") is train
        drawn = []
        for epoch in range(2):
            control.start_epoch("train", epoch)
            iterator = iter(train)
            batches = [next(iterator)]
            for number in range(validations):
                control.start_epoch("validate", 2 * epoch + number)
                rows(validate)
            drawn.append([*batches, *iterator])
        control.release()
        assert snapshot(loader) == before
        return repr(drawn)

    assert found(0) == found(2)


def test_two_loaders_may_hold_one_sampler():
    def found(validations):
        sampler = RandomSampler(range(SIZE))
        control = LoaderControl(1, fit=0, rank=0, per_sample_rng=False)
        train, validate = (
            control.wrap_loader(make(shuffle=False, sampler=sampler), stage)
            for stage in ("train", "validate")
        )
        drawn = []
        for epoch in range(2):
            control.start_epoch("train", epoch)
            drawn.append(rows(train))
            for number in range(validations):
                control.start_epoch("validate", 2 * epoch + number)
                rows(validate)
        control.release()
        assert sampler.generator is None
        return order(drawn)

    assert found(0) == found(2)


@pytest.mark.parametrize(
    "make_sampler",
    [
        lambda seed: RandomSampler(
            range(SIZE), generator=None if seed is None else torch.Generator().manual_seed(seed)
        ),
        lambda seed: DistributedSampler(range(SIZE), 2, 0, seed=seed or 0),
    ],
    ids=["generator", "distributed"],
)
def test_a_seed_of_the_user_counts_beside_ours(make_sampler):
    def draw(seed, ours=1):
        loader = make(shuffle=False, sampler=make_sampler(seed))
        found = []
        for stages in (("train",), ("validate", "train")):  # another stage may be the first
            control = LoaderControl(ours, fit=0, rank=0, per_sample_rng=False)
            wrapped = {stage: control.wrap_loader(loader, stage) for stage in stages}
            for stage in stages:
                control.start_epoch(stage, 0)
            found.append(order([rows(wrapped["train"])]))
            control.release()
        assert found[0] == found[1]
        return found[0]

    assert draw(5) == draw(5)
    orders = [draw(None), draw(5), draw(6), draw(5, ours=2)]
    assert all(orders.count(one) == 1 for one in orders)


def test_a_loader_that_is_made_anew_every_epoch_is_not_kept_alive():
    control = LoaderControl(1, fit=0, rank=0, per_sample_rng=True)
    seen = weakref.WeakSet()
    found = []
    for epoch in range(3):
        dataset = Draws()
        loader = make(dataset)
        seen.add(dataset)
        control.wrap_loader(loader, "train")
        control.start_epoch("train", epoch)
        found.append(rows(loader))
        del loader, dataset
    gc.collect()
    assert len(seen) <= 1
    control.release()
    gc.collect()
    assert not seen
    # A loader that lives on draws the same, and so does one of a run that is resumed.
    assert found == epochs(make(), count=3, per_sample=True)


def test_long_lived_workers_of_the_users_are_set_aside():
    """They were started before, and know nothing of the streams."""
    loader = make(**WORKERS[1])
    rows(loader)
    users = loader._iterator
    assert epochs(loader) == epochs(make(**WORKERS[1]))
    assert loader._iterator is users
    assert epochs(loader, fit=1) == epochs(make(**WORKERS[1]), fit=1)


class FirstIsSlow(Draws):
    """The batch that holds sample 0 comes after another worker's."""

    seconds = 0.0

    def __init__(self):
        self.other_is_done = multiprocessing.Event()

    def __getitem__(self, index):
        if index == 0:
            assert self.other_is_done.wait(60)
            time.sleep(self.seconds)  # until the other's batch is in the queue
        if index == SIZE - 1:  # worker 1 begins its second batch
            self.other_is_done.set()
        return super().__getitem__(index)


@needs_in_order
def test_batches_come_in_order_although_the_loader_allows_any():
    """``in_order=False`` gives batches as workers finish them, which varies from run to run."""
    loader = make(FirstIsSlow(), shuffle=None, in_order=False, **WORKERS[0])
    expected = epochs(make(FirstIsSlow(), shuffle=None, **WORKERS[0]), count=1)
    with pytest.warns(UserWarning, match="A DataLoader has in_order=False"):
        assert epochs(loader, count=1) == expected
    assert loader.in_order is False
    late = FirstIsSlow()
    late.seconds = 2.0
    free = make(late, shuffle=None, in_order=False, **WORKERS[0])
    assert order([rows(free)]) != order(expected)  # without control the slow batch is late


@pytest.mark.parametrize("other", [[1, 2, 3], range(4), SequentialSampler(range(3))])
def test_what_is_no_dataloader_is_left_alone(other):
    control = LoaderControl(1, fit=0, rank=0, per_sample_rng=True)
    assert control.wrap_loader(other, "train") is other
    control.start_epoch("train", 0)
    control.release()


@pytest.mark.parametrize(
    ("words", "kept"),
    [({}, True), (WORKERS[0], True), (WORKERS[1], False)],
    ids=["none", "workers", "persistent"],
)
def test_a_number_of_a_dataset_is_kept_unless_it_stays_in_persistent_workers(words, kept):
    """A change of the program does not reach the copies that persistent workers have."""
    dataset = Draws()
    dataset.epoch = 0
    control = LoaderControl(1, fit=0, rank=0, per_sample_rng=False)
    control.wrap_loader(make(dataset, **words), "train")
    dataset.epoch = 1
    found = control.capture_samplers("train", within=False)
    assert (DATA in found.get("0", {})) == kept
    control.release()


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


SHARED = {
    "DistributedSampler": lambda rank: make(
        shuffle=False, sampler=DistributedSampler(range(SIZE), 2, rank)
    ),
    "Lightning's wrapper": wrap(RandomSampler),
    "Lightning's wrapper, in order": wrap(SequentialSampler),
    "a batch sampler of the user's": lambda rank: DataLoader(Draws(), batch_sampler=Dealer(rank)),
}


@pytest.mark.parametrize("name", SHARED)
def test_ranks_share_out_one_order(name):
    def found(rank, seed=1):
        return order(epochs(SHARED[name](rank), seed=seed, rank=rank))

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
