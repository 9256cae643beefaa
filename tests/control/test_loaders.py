"""Loaders under control: what they draw depends on (seed, fit, rank, epoch) alone."""

import functools
import gc
import random
import weakref

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


@pytest.mark.parametrize("sampler", [RandomSampler, SequentialSampler], ids=lambda s: s.__name__)
def test_ranks_share_out_what_lightnings_wrapper_wraps(sampler):
    from lightning.fabric.utilities.distributed import DistributedSamplerWrapper

    def found(rank, seed=1):
        wrapper = DistributedSamplerWrapper(
            sampler(range(SIZE)), num_replicas=2, rank=rank, shuffle=False
        )
        return order(epochs(make(shuffle=False, sampler=wrapper), seed=seed, rank=rank))

    for first, second in zip(found(0), found(1), strict=True):
        assert sorted(first + second) == list(range(SIZE))
    assert found(0) == found(0)
    assert (found(0) == found(0, seed=2)) == (sampler is SequentialSampler)


class Dealer:
    """A user's own batch sampler, which deals the batches of one order out to two ranks."""

    def __init__(self, rank):
        self.rank = rank
        self.sampler = RandomSampler(range(SIZE))

    def __iter__(self):
        return iter(list(BatchSampler(self.sampler, 2, drop_last=False))[self.rank :: 2])


def test_ranks_share_out_what_a_users_batch_sampler_deals():
    found = [
        order(epochs(DataLoader(Draws(), batch_sampler=Dealer(rank)), rank=rank, count=1))[0]
        for rank in (0, 1)
    ]
    assert sorted(found[0] + found[1]) == list(range(SIZE))


def test_a_resumed_run_sees_the_order_of_its_epoch():
    """Before Lightning says the epoch, long after it has made the iterator."""

    def loader():
        return make(shuffle=False, sampler=DistributedSampler(range(SIZE), 1, 0))

    straight = order(epochs(loader(), count=3))
    assert order(epochs(loader(), start=2, count=1)) == straight[2:]
    resumed = loader()
    epochs(resumed, start=2, count=1)
    assert resumed.sampler.epoch == 0  # put back


class Peculiar(RandomSampler):
    """A sampler with a generator of NumPy's, or one that cannot be set."""

    @property
    def generator(self):
        return self.own

    @generator.setter
    def generator(self, value):
        if value is not None:
            raise AttributeError("read-only")


@pytest.mark.parametrize("own", [None, np.random.default_rng(3), torch.Generator()], ids=repr)
def test_a_generator_that_is_not_torchs_or_cannot_be_set_is_left_alone(own):
    sampler = Peculiar(range(SIZE))
    sampler.own = own
    loader = make(shuffle=False, sampler=sampler)
    control = LoaderControl(1, fit=0, rank=0, per_sample_rng=False)
    control.take_over(loader, "train")
    control.start_epoch("train", 0)
    assert sampler.generator is own
    control.release()
    assert sampler.generator is own


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


@pytest.mark.parametrize("workers", [{}, WORKERS[1]], ids=["none", "persistent"])
@pytest.mark.parametrize(
    "index",
    [lambda i: i, lambda i: f"name {i}", lambda i: (i, 0.5), np.int64, torch.tensor],
    ids=["int", "str", "tuple", "numpy", "tensor"],
)
def test_per_sample_rng_takes_what_samplers_give(index, workers):
    loader = make(Keyed(), shuffle=False, sampler=[index(i) for i in range(4)], **workers)
    again = make(Keyed(), shuffle=False, sampler=[index(i) for i in (3, 2, 1, 0)], **workers)
    found = epochs(loader, per_sample=True, count=1)[0]
    assert epochs(again, per_sample=True, count=1)[0] == found[::-1]
    assert len(set(found)) == 4


class Keyed(Dataset):
    def __getitem__(self, key):
        return [random.random()]


class Key:
    """An index whose text differs between processes."""


def test_per_sample_rng_refuses_an_index_that_names_no_sample():
    loader = make(Keyed(), shuffle=False, sampler=[Key()])
    with pytest.raises(SettingError, match=r"gives <.*Key object.* whole numbers, strings"):
        epochs(loader, per_sample=True)


def test_per_sample_rng_does_not_depend_on_the_rank():
    by_index = [
        {row[0]: row for row in epochs(make(), rank=rank, per_sample=True, count=1)[0]}
        for rank in (0, 1)
    ]
    assert by_index[0] == by_index[1]


def test_per_sample_rng_of_a_stream_is_refused():
    with pytest.raises(SettingError, match="Stream is an IterableDataset"):
        epochs(make(Stream(), shuffle=False), per_sample=True)


def test_an_epoch_that_was_cut_short_leaves_nothing_to_the_next():
    """What long-lived workers prefetched and nobody took is done before the next epoch begins."""

    def found(workers):
        loader = make(Draws(), prefetch_factor=2, **workers)
        control = LoaderControl(1, fit=0, rank=0, per_sample_rng=False)
        control.take_over(loader, "train")
        batches = []
        for epoch in range(3):
            control.start_epoch("train", epoch)
            if epoch and loader.persistent_workers:
                assert loader._iterator._tasks_outstanding == 0
            batches.append(next(iter(loader)))
            if loader.persistent_workers:
                assert loader._iterator._tasks_outstanding > 0
        control.release()
        return repr(batches)

    assert found(WORKERS[0]) == found(WORKERS[1])


@pytest.mark.parametrize("workers", WORKERS, ids=["workers", "persistent"])
def test_a_loader_that_is_iterated_again_within_an_epoch_draws_anew(workers):
    """Lightning cycles through the shorter of two loaders."""

    def found():
        loader = make(shuffle=False, **workers)
        control = LoaderControl(1, fit=0, rank=0, per_sample_rng=False)
        control.take_over(loader, "train")
        control.start_epoch("train", 0)
        twice = rows(loader), rows(loader)
        control.release()
        return twice

    first, second = found()
    assert not {row[1:] for row in first} & {row[1:] for row in second}
    assert found() == (first, second)


class Shard(IterableDataset):
    """The stream of torch's documentation, which a worker's function cuts."""

    def __init__(self):
        self.start, self.end = 0, SIZE

    def __iter__(self):
        return iter(range(self.start, self.end))


def cut(worker):
    dataset = get_worker_info().dataset
    half = SIZE // 2
    dataset.start, dataset.end = worker * half, (worker + 1) * half


@pytest.mark.parametrize("workers", WORKERS, ids=["workers", "persistent"])
def test_a_worker_function_that_sets_attributes_reaches_the_users_dataset(workers):
    loader = DataLoader(Shard(), worker_init_fn=cut, **workers)
    control = LoaderControl(1, fit=0, rank=0, per_sample_rng=False)
    control.take_over(loader, "train")
    for epoch in range(2):
        control.start_epoch("train", epoch)
        assert sorted(map(int, loader)) == list(range(SIZE))
    control.release()


@pytest.mark.parametrize("context", ["spawn", "forkserver"])
def test_every_way_to_start_workers_draws_the_same(context):
    workers = WORKERS[1]
    forked = epochs(make(**workers), per_sample=True)
    assert epochs(make(**workers, multiprocessing_context=context), per_sample=True) == forked


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


def test_the_stand_in_passes_for_the_users_dataset():
    loader = make()
    control = LoaderControl(1, fit=0, rank=0, per_sample_rng=True)
    control.take_over(loader, "train")
    assert isinstance(loader.dataset, Draws)
    loader.dataset.size = 3
    assert loader.dataset.size == 3
    del loader.dataset.size
    loader.dataset.kept = 4
    control.release()
    assert loader.dataset.kept == 4
    assert not hasattr(loader.dataset, "size")


@pytest.mark.parametrize("words", [{}, *WORKERS], ids=["none", "workers", "persistent"])
@pytest.mark.parametrize("per_sample", [False, True])
def test_one_loader_for_training_and_validation_serves_both(words, per_sample):
    """What validation draws never changes what training draws."""

    def found(validations):
        loader = make(**words)
        before = snapshot(loader)
        control = LoaderControl(1, fit=0, rank=0, per_sample_rng=per_sample)
        validate = control.take_over(loader, "validate")
        train = control.take_over(loader, "train")
        assert control.take_over(train, "train") is train
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
        # In the main process, without a seed for each sample, the samples draw from what all draw.
        own = words or per_sample
        return repr(drawn if own else [[batch[0] for batch in epoch] for epoch in drawn])

    assert found(0) == found(2)


def test_two_loaders_may_hold_one_sampler():
    def found(validations):
        sampler = RandomSampler(range(SIZE))
        control = LoaderControl(1, fit=0, rank=0, per_sample_rng=False)
        train, validate = (
            control.take_over(make(shuffle=False, sampler=sampler), stage)
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


def test_loaders_of_one_stage_draw_different_orders():
    control = LoaderControl(1, fit=0, rank=0, per_sample_rng=False)
    first, second = control.take_over([make(), make()], "train")
    control.start_epoch("train", 0)
    assert order([rows(first)]) != order([rows(second)])
    control.release()


@pytest.mark.parametrize("container", [list, tuple, lambda x: dict(enumerate(x))])
def test_loaders_in_containers_are_taken_over(container):
    from lightning.pytorch.utilities import CombinedLoader

    loaders = container([make(), [make(), range(3)]])
    assert LoaderControl(1, fit=0, rank=0, per_sample_rng=False).take_over(loaders, "t") is loaders
    assert type(loaders[0].generator) is torch.Generator
    assert type(loaders[1][0].generator) is torch.Generator
    combined = CombinedLoader(loaders)
    control = LoaderControl(1, fit=0, rank=0, per_sample_rng=False)
    flattened = list(combined.flattened)
    assert control.take_over(combined, "validate") is combined
    assert control.take_over(combined, "train") is combined  # which takes copies
    assert combined.flattened[0] is not flattened[0]
    control.release()
    assert all(new is old for new, old in zip(combined.flattened, flattened, strict=True))


def test_a_loader_that_is_made_anew_every_epoch_is_not_kept_alive():
    control = LoaderControl(1, fit=0, rank=0, per_sample_rng=True)
    seen = weakref.WeakSet()
    found = []
    for epoch in range(3):
        dataset = Draws()
        loader = make(dataset)
        seen.add(dataset)
        control.take_over(loader, "train")
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


def test_a_loader_that_is_handed_over_again_starts_its_epoch_anew():
    """As for the training that follows a search for the learning rate."""
    loader = make()
    control = LoaderControl(1, fit=0, rank=0, per_sample_rng=False)
    control.take_over(loader, "train")
    control.start_epoch("train", 0)
    first = rows(loader)
    control.take_over(loader, "train")
    control.start_epoch("train", 0)
    assert order([rows(loader)]) == order([first])
    control.release()


def test_long_lived_workers_of_the_users_are_set_aside():
    """They were started before, and know nothing of the streams."""
    loader = make(**WORKERS[1])
    rows(loader)
    users = loader._iterator
    assert epochs(loader) == epochs(make(**WORKERS[1]))
    assert loader._iterator is users
    assert epochs(loader, fit=1) == epochs(make(**WORKERS[1]), fit=1)


class Quack:
    """Has all that a loader has, and is none."""

    dataset = sampler = batch_sampler = generator = flattened = None
    num_workers = 2
    persistent_workers = True

    def __iter__(self):
        return iter(())


@pytest.mark.parametrize("other", [[1, 2, 3], range(4), SequentialSampler(range(3)), Quack()])
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
