"""Loaders under control: what they draw depends on (seed, fit, rank, epoch) alone."""

import functools
import random

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

from lightning_d9m import SettingError
from lightning_d9m.control.loaders import LoaderControl
from lightning_d9m.control.seeding import capture_rng, restore_rng

SIZE = 12


class Draws(Dataset):
    """Each sample is its index and a draw from Python, NumPy and torch."""

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        return [float(index), random.random(), float(np.random.rand()), float(torch.rand(()))]


class BatchDraws(Draws):
    """The same, with torch's way to fetch a batch at once."""

    def __getitems__(self, indices):
        offset = random.random()
        return [[*self[index], offset] for index in indices]


class Stream(IterableDataset):
    """A stream of draws, shared out among the workers."""

    def __iter__(self):
        info = get_worker_info()
        for index in range(SIZE)[info.id if info else 0 :: info.num_workers if info else 1]:
            yield [float(index), random.random(), float(np.random.rand()), float(torch.rand(()))]


def rows(loader):
    return [tuple(float(x) for x in row) for batch in loader for row in zip(*batch, strict=True)]


def epochs(loader, *, count=2, seed=1, fit=0, rank=0, per_sample=False, stage="train", start=0):
    """Return what a loader gives in each epoch, under a control of its own."""
    control = LoaderControl(seed, fit=fit, rank=rank, per_sample_rng=per_sample)
    try:
        assert control.take_over(loader, stage) is loader
        found = []
        for epoch in range(start, start + count):
            control.start_epoch(stage, epoch)
            found.append(rows(loader))
        return found
    finally:
        control.release()


def make(dataset=None, **words):
    return DataLoader(dataset or Draws(), batch_size=3, **({"shuffle": True} | words))


def order(found):
    return [[int(row[0]) for row in epoch] for epoch in found]


SAMPLERS = {
    "random": lambda: {"sampler": RandomSampler(range(SIZE))},
    "replacement": lambda: {"sampler": RandomSampler(range(SIZE), replacement=True)},
    "weighted": lambda: {"sampler": WeightedRandomSampler([1.0, 2.0] * (SIZE // 2), SIZE)},
    "subset": lambda: {"sampler": SubsetRandomSampler(range(2, SIZE))},
    "batch sampler": lambda: {
        "batch_sampler": BatchSampler(RandomSampler(range(SIZE)), 3, drop_last=False)
    },
}


@pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS.keys())
class TestOrder:
    """The order of the samples."""

    @staticmethod
    def loader(sampler):
        words = sampler()
        return DataLoader(
            Draws(), **words, **({} if "batch_sampler" in words else {"batch_size": 3})
        )

    def test_is_a_function_of_seed_fit_and_epoch(self, sampler):
        base = order(epochs(self.loader(sampler)))
        torch.rand(7)
        assert order(epochs(self.loader(sampler))) == base
        assert base[0] != base[1]
        assert order(epochs(self.loader(sampler), start=1, count=1)) == base[1:]
        for other in ({"seed": 2}, {"fit": 1}, {"rank": 1}, {"stage": "validate"}):
            assert order(epochs(self.loader(sampler), **other))[0] != base[0]

    def test_leaves_the_generators_of_the_training_alone(self, sampler):
        loader = self.loader(sampler)
        control = LoaderControl(1, fit=0, rank=0, per_sample_rng=True)
        control.take_over(loader, "train")
        control.start_epoch("train", 0)
        state = capture_rng()
        expected = torch.rand(3), random.random()
        restore_rng(state)
        rows(loader)
        assert torch.equal(torch.rand(3), expected[0])
        assert random.random() == expected[1]
        control.release()


def test_ranks_cut_one_permutation():
    found = [
        order(
            epochs(make(shuffle=False, sampler=DistributedSampler(range(SIZE), 2, rank)), rank=rank)
        )
        for rank in (0, 1)
    ]
    for first, second in zip(*found, strict=True):
        assert sorted(first + second) == list(range(SIZE))
    again = order(epochs(make(shuffle=False, sampler=DistributedSampler(range(SIZE), 2, 0))))
    assert again == found[0]


def test_the_sampler_within_lightnings_wrapper_is_found():
    from lightning.fabric.utilities.distributed import DistributedSamplerWrapper

    def wrapped(seed):
        sampler = DistributedSamplerWrapper(
            WeightedRandomSampler([1.0] * SIZE, SIZE), num_replicas=1, rank=0, shuffle=False
        )
        return order(epochs(make(shuffle=False, sampler=sampler), seed=seed))

    assert wrapped(1) == wrapped(1) != wrapped(2)


WORKERS = [{"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}]


@pytest.mark.parametrize("dataset", [Draws, BatchDraws, Stream])
@pytest.mark.parametrize("workers", WORKERS, ids=["workers", "persistent"])
def test_workers_draw_what_seed_rank_and_epoch_say(workers, dataset):
    words = workers | ({"shuffle": False} if dataset is Stream else {})
    base = epochs(make(dataset(), **words))
    assert epochs(make(dataset(), **words)) == base
    # Batches come from the workers by turns: the first two hold the draws of both.
    draws = [row[1:4] for epoch in base for row in epoch]
    assert len(set(draws)) == len(draws)
    for other in ({"seed": 2}, {"fit": 1}, {"rank": 1}, {"start": 5}):
        others = epochs(make(dataset(), **words), count=1, **other)
        assert not {row[1:4] for row in others[0]} & set(draws)


def test_a_long_lived_worker_draws_the_same_as_one_that_starts_anew():
    """So that a resumed run, whose workers are new, can agree with a straight one."""
    persistent = epochs(make(**WORKERS[1]), count=3)
    assert epochs(make(**WORKERS[0]), count=3) == persistent
    assert epochs(make(**WORKERS[1]), start=2, count=1) == persistent[2:]


@pytest.mark.parametrize("dataset", [Draws, BatchDraws])
def test_per_sample_rng_does_not_depend_on_workers(dataset):
    found = {
        repr(epochs(make(dataset(), **workers), count=3, per_sample=True))
        for workers in ({}, {"num_workers": 1}, *WORKERS)
    }
    assert len(found) == 1


def test_per_sample_rng_does_not_depend_on_the_rank():
    by_index = [
        {row[0]: row for row in epochs(make(), rank=rank, per_sample=True, count=1)[0]}
        for rank in (0, 1)
    ]
    assert by_index[0] == by_index[1]


def test_per_sample_rng_of_a_stream_is_refused():
    with pytest.raises(SettingError, match="Stream is an IterableDataset"):
        epochs(make(Stream(), shuffle=False), per_sample=True)


def offset_python(worker, *, by):
    """A user's function for workers, called after they are seeded."""
    random.seed(random.random() + by)


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_the_users_function_for_workers_is_kept_and_called(context):
    def found(by):
        init = functools.partial(offset_python, by=by)
        words = {"num_workers": 1, "multiprocessing_context": context}
        return epochs(make(worker_init_fn=init, **words), count=1)[0]

    zero, again, one = found(0), found(0), found(1)
    assert zero == again
    assert [row[1] for row in zero] != [row[1] for row in one]  # Python's, which it changes
    assert [row[2:] for row in zero] == [row[2:] for row in one]


def snapshot(loader):
    """Return every attribute of a loader and of its samplers."""
    found = {("loader", *item) for item in ((k, id(v)) for k, v in vars(loader).items())}
    for sampler in (loader.sampler, loader.batch_sampler):
        found |= {(id(sampler), k, id(v)) for k, v in vars(sampler or loader).items()}
    return found


@pytest.mark.parametrize("per_sample", [False, True])
@pytest.mark.parametrize("words", [{}, *WORKERS], ids=["none", "workers", "persistent"])
def test_everything_of_the_users_is_put_back(words, per_sample):
    loader = make(**words)
    before = snapshot(loader)
    control = LoaderControl(1, fit=0, rank=0, per_sample_rng=per_sample)
    control.take_over(loader, "train")
    control.start_epoch("train", 0)
    assert snapshot(loader) != before
    control.release()
    assert snapshot(loader) == before
    assert isinstance(loader.dataset, Draws)


def test_the_stand_in_answers_for_the_users_dataset():
    dataset = Draws()
    dataset.classes = ["a", "b"]
    loader = make(dataset)
    control = LoaderControl(1, fit=0, rank=0, per_sample_rng=True)
    control.take_over(loader, "train")
    assert loader.dataset.classes == ["a", "b"]
    assert len(loader.dataset) == SIZE
    assert not hasattr(loader.dataset, "no_such_thing")
    control.release()


def test_a_loader_that_is_used_twice_is_taken_over_once_a_stage():
    loader = make()
    control = LoaderControl(1, fit=0, rank=0, per_sample_rng=False)
    before = snapshot(loader)
    for stage in ("train", "train", "validate"):
        control.take_over(loader, stage)
    for stage in ("train", "validate"):
        control.start_epoch(stage, 0)
    rows(loader)
    control.release()
    assert snapshot(loader) == before


@pytest.mark.parametrize("other", [[1, 2, 3], range(4), SequentialSampler(range(3))])
def test_what_is_no_dataloader_is_left_alone(other):
    control = LoaderControl(1, fit=0, rank=0, per_sample_rng=True)
    assert control.take_over(other, "train") is other
    control.start_epoch("train", 0)
    control.release()


def test_an_epoch_that_was_started_is_not_started_again():
    """Lightning makes the first iterator before it announces the first epoch."""
    loader = make()
    control = LoaderControl(1, fit=0, rank=0, per_sample_rng=False)
    control.take_over(loader, "train")
    control.start_epoch("train", 0)
    iterator = iter(loader)
    first = next(iterator)
    control.start_epoch("train", 0)
    found = order([[row for batch in (first, *iterator) for row in zip(*batch, strict=True)]])
    control.release()
    assert found == order(epochs(make(), count=1))
