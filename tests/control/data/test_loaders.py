"""Loaders under control: order and draws follow from the seed, an epoch continues at any batch.

What is replaced is put back.
"""

import functools
import gc
import os
import random
import re
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
    get_worker_info,
)
from torch_features import needs_in_order

from lightning_d9m import SettingError
from lightning_d9m.engine.control.data.data_state import DATA, UNSAVED_DATA
from lightning_d9m.engine.control.data.loaders import LoaderControl, find_loader_problems
from lightning_d9m.engine.control.seeding import seed_host

SIZE = 12
WORKERS = [{"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}]
KINDS_OF_WORKERS = pytest.mark.parametrize("workers", WORKERS, ids=["workers", "persistent"])


def draw(index):
    return [float(index), random.random(), float(np.random.rand()), float(torch.rand(()))]


class Draws(Dataset):
    """Each sample is its index and a draw from Python, NumPy and torch."""

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        return draw(index)


class BatchDraws(Draws):
    """The same, with torch's way to fetch a batch at once."""

    def __getitems__(self, indices):
        offset = random.random()
        return [[*self[index], offset] for index in indices]


class Stream(IterableDataset):
    """A stream of draws, shared out among the workers."""

    def __iter__(self):
        info = get_worker_info()
        shared = slice(info.id, None, info.num_workers) if info else slice(None)
        return map(draw, range(SIZE)[shared])


def make(dataset=None, **words):
    return DataLoader(dataset or Draws(), batch_size=3, **({"shuffle": True} | words))


def by(sampler, **words):
    return make(shuffle=False, sampler=sampler, **words)


def rows(loader):
    return [tuple(float(x) for x in row) for batch in loader for row in zip(*batch, strict=True)]


def order(found):
    return [[int(row[0]) for row in epoch] for epoch in found]


def begin_control(*, seed=1, fit=0, rank=0, per_sample=False):
    return LoaderControl(seed, fit=fit, rank=rank, per_sample_rng=per_sample)


def begin(loader, epoch=0, stage="train", **words):
    """Begin an epoch of a loader; return its control, which the test releases."""
    control = begin_control(**words)
    assert control.wrap_loader(loader, stage) is loader
    control.start_epoch(stage, epoch)
    return control


def epochs(loader, *, count=2, start=0, stage="train", **words):
    """Return what a loader gives in each epoch, under a control of its own."""
    control = begin(loader, start, stage, **words)
    try:
        found = [rows(loader)]
        for epoch in range(start + 1, start + count):
            control.start_epoch(stage, epoch)
            found.append(rows(loader))
        return found
    finally:
        control.release()


def snapshot(loader):
    owners = (loader, loader.sampler, loader.batch_sampler)
    return [(id(own), {k: id(v) for k, v in vars(own).items()}) for own in owners]


@pytest.mark.parametrize(
    ("shared", "words", "per_sample"),
    [
        ("sampler", {}, False),
        ("loader", {}, True),
        ("loader", WORKERS[0], False),
        ("loader", WORKERS[1], True),
    ],
)
def test_what_validation_draws_never_changes_what_training_draws(shared, words, per_sample):
    """If both have the same loader, or loaders with the same sampler."""

    def find(validations):
        loader = by(RandomSampler(range(SIZE)), **words)
        other = loader if shared == "loader" else by(loader.sampler, **words)
        before = snapshot(loader), snapshot(other)
        control = begin_control(per_sample=per_sample)
        validate = control.wrap_loader(other, "validate")
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
        assert (snapshot(loader), snapshot(other)) != before
        control.release()
        assert (snapshot(loader), snapshot(other)) == before
        return repr(drawn)

    assert find(0) == find(2)


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
    def find(seed, ours=1):
        loader = by(make_sampler(seed))
        found = []
        for stages in (("train",), ("validate", "train")):  # another stage may be the first
            control = begin_control(seed=ours)
            wrapped = {stage: control.wrap_loader(loader, stage) for stage in stages}
            for stage in stages:
                control.start_epoch(stage, 0)
            found.append(order([rows(wrapped["train"])]))
            control.release()
        assert found[0] == found[1]
        return found[0]

    assert find(5) == find(5)
    orders = [find(None), find(5), find(6), find(5, ours=2)]
    assert all(orders.count(one) == 1 for one in orders)


def test_a_loader_that_is_made_anew_every_epoch_is_not_kept_alive():
    control = begin_control(per_sample=True)
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


@needs_in_order
def test_batches_come_in_order_although_the_loader_allows_any():
    """``in_order=False`` gives batches as workers finish them, which varies from run to run."""
    loader = make(in_order=False, **WORKERS[0])
    with pytest.warns(UserWarning, match="A DataLoader has in_order=False"):
        control = begin(loader)
    assert loader.in_order
    control.release()
    assert loader.in_order is False


def test_what_is_no_dataloader_is_left_alone():
    for other in ([1, 2, 3], SequentialSampler(range(3))):
        begin(other, per_sample=True).release()


@pytest.mark.parametrize("words", [{}, *WORKERS], ids=["none", "workers", "persistent"])
@pytest.mark.parametrize("stage", ["train", "validate"])
def test_a_number_of_a_dataset_is_kept_unless_workers_have_another(words, stage):
    """A change of the program does not reach the copies that persistent workers have."""
    dataset = Draws()
    dataset.epoch = 0
    control = begin(make(dataset, **words), stage=stage)
    dataset.epoch = 1
    (found,) = control.capture_samplers(stage, within=False).values()
    unsaved = stage == "validate" and "persistent_workers" in words
    assert [*found[DATA]] == ["dataset.epoch"]
    assert found.get(UNSAVED_DATA) == (["dataset.epoch"] if unsaved else None)
    control.release()


class Dealer:
    """A user's own batch sampler, which deals the batches of one order out to two ranks."""

    def __init__(self, rank):
        self.rank = rank
        self.sampler = RandomSampler(range(SIZE))

    def __iter__(self):
        return iter(list(BatchSampler(self.sampler, 2, drop_last=False))[self.rank :: 2])


def wrap(sampler, rank):
    from lightning.fabric.utilities.distributed import DistributedSamplerWrapper

    return by(DistributedSamplerWrapper(sampler(range(SIZE)), 2, rank, shuffle=False))


SHARED = {
    "DistributedSampler": lambda rank: by(DistributedSampler(range(SIZE), 2, rank)),
    "Lightning's wrapper": functools.partial(wrap, RandomSampler),
    "Lightning's wrapper, in order": functools.partial(wrap, SequentialSampler),
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
    generator = property(lambda self: self.own, lambda self, value: self.refuse(value))

    def refuse(self, value):
        if value is not None:
            raise AttributeError("read-only")


@pytest.mark.parametrize(
    "own", [None, np.random.default_rng(3), torch.Generator()], ids=["none", "numpy", "torch"]
)
def test_a_generator_that_is_not_torchs_or_cannot_be_set_is_left_alone(own):
    sampler = Peculiar(range(SIZE))
    sampler.own = own
    control = begin(by(sampler))
    assert sampler.generator is own
    control.release()
    assert sampler.generator is own


@pytest.mark.parametrize("dataset", [BatchDraws, Stream])
@KINDS_OF_WORKERS
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


class DrawnOrder(IterableDataset):
    def __iter__(self):
        return iter(torch.randperm(SIZE).tolist())


@KINDS_OF_WORKERS
def test_an_epoch_that_is_started_again_draws_the_same(workers):
    """Lightning 2.5 iterates a loader twice before it resumes; persistent workers live on."""
    loader = DataLoader(DrawnOrder(), batch_size=3, **workers)
    control = begin(loader)
    found = []
    for epoch in (0, 1):
        control.start_epoch("train", epoch)
        found.append([batch.tolist() for batch in loader])
        control.restart_epoch("train", epoch)
        assert [batch.tolist() for batch in loader] == found[epoch]
    control.release()
    assert found[0] != found[1]


class Keyed(Dataset):
    def __getitem__(self, key):
        return [random.random()]


@pytest.mark.parametrize(
    ("index", "workers"),
    [
        (lambda i: i, WORKERS[1]),
        (lambda i: f"name {i}", {}),
        (lambda i: (i, 0.5), {}),
        (np.int64, {}),
        (torch.tensor, {}),
    ],
    ids=["int", "str", "tuple", "numpy", "tensor"],
)
def test_per_sample_rng_takes_what_samplers_give(index, workers):
    found, again = (
        epochs(
            make(Keyed(), shuffle=False, sampler=[index(i) for i in indices], **workers),
            per_sample=True,
            count=1,
        )[0]
        for indices in ((0, 1, 2, 3), (3, 2, 1, 0))
    )
    assert again == found[::-1]
    assert len(set(found)) == 4


def test_per_sample_rng_refuses_samples_without_an_index():
    with pytest.raises(SettingError, match=r"gives <object object.* integers, strings"):
        epochs(make(Keyed(), shuffle=False, sampler=[object()]), per_sample=True)
    with pytest.raises(SettingError, match="Stream is an IterableDataset"):
        epochs(make(Stream(), shuffle=False), per_sample=True)


def test_per_sample_rng_does_not_depend_on_the_rank():
    by_rank = [sorted(epochs(make(), rank=n, per_sample=True, count=1)[0]) for n in (0, 1)]
    assert by_rank[0] == by_rank[1]


def test_an_epoch_that_was_cut_short_leaves_nothing_to_the_next():
    """Of what long-lived workers prefetched and nobody took, the next epoch draws nothing."""

    def found(workers):
        loader = make(prefetch_factor=2, **workers)
        control = begin(loader)
        batches = []
        for epoch in range(3):
            control.start_epoch("train", epoch)
            batches.append(next(iter(loader)))
            if loader.persistent_workers:
                assert loader._iterator._tasks_outstanding > 0
        control.release()
        return repr(batches)

    assert found(WORKERS[0]) == found(WORKERS[1])


@KINDS_OF_WORKERS
def test_a_loader_that_is_iterated_again_within_an_epoch_draws_anew(workers):
    """Lightning cycles through the shorter of two loaders."""

    def found():
        loader = make(shuffle=False, **workers)
        control = begin(loader)
        twice = rows(loader), rows(loader)
        control.release()
        return twice

    first, second = found()
    assert not {row[1:] for row in first} & {row[1:] for row in second}
    assert found() == (first, second)


class Marked(Draws):
    """Each sample also says what the user's function for workers left in the dataset."""

    mark = 0.0

    def __getitem__(self, index):
        return [*super().__getitem__(index), self.mark]


def mark(worker, *, by):
    """A user's function for workers, called after they are seeded."""
    get_worker_info().dataset.mark = random.random() + by


def test_workers_that_are_spawned_draw_the_same_and_call_the_users_function(
    monkeypatch, forking_python
):
    # A Python that has imported torch.
    monkeypatch.setattr("multiprocessing.spawn._python_exe", os.fsencode(forking_python))

    def found(by, context):
        init = functools.partial(mark, by=by)
        words = {"num_workers": 1, "multiprocessing_context": context}
        return epochs(make(Marked(), worker_init_fn=init, **words), count=1, per_sample=True)[0]

    zero, one = found(0, "fork"), found(1, "spawn")
    assert [row[4] + 1 for row in zero] == [row[4] for row in one]
    assert [row[:4] for row in zero] == [row[:4] for row in one]  # a batch has a seed of its own


class MarkedBatches(Marked):
    """The same, with torch's way to fetch a batch at once."""

    def __getitems__(self, indices):
        return [self[index] for index in indices]


def mark_by_sample(worker):
    dataset = get_worker_info().dataset
    dataset.mark = dataset[3][0]


def mark_by_batch(worker):
    dataset = get_worker_info().dataset
    dataset.mark = dataset.__getitems__([3, 4])[0][0]


@pytest.mark.parametrize("init", [mark_by_sample, mark_by_batch])
@pytest.mark.parametrize("kind", [Marked, MarkedBatches])
def test_a_function_for_workers_may_read_samples(init, kind):
    loader = make(kind(), worker_init_fn=init, num_workers=1)
    assert {row[4] for row in epochs(loader, count=1)[0]} == {3.0}


class Collated:
    def __call__(self, samples):
        return [*map(list, zip(*samples, strict=True)), [random.random()] * len(samples)]


class DrawnBatches:
    """A batch sampler of the user's that draws from Python's generator, batch by batch."""

    def __iter__(self):
        for _ in range(SIZE // 3):
            yield random.sample(range(SIZE), 3)

    def __len__(self):
        return SIZE // 3


LOADERS = {
    "shuffled": make,
    "batches at once": lambda **words: make(BatchDraws(), **words),
    "a collate function that draws": lambda **words: make(collate_fn=Collated(), **words),
    "replacement": lambda **words: by(RandomSampler(range(SIZE), replacement=True), **words),
    "a distributed sampler": lambda **words: by(DistributedSampler(range(24), 2, 1), **words),
    "a batch sampler of the user's": lambda **words: DataLoader(
        Draws(), batch_sampler=DrawnBatches(), **words
    ),
    "no batches": lambda **words: DataLoader(Draws(), batch_size=None, shuffle=True, **words),
}


def take(loader, *, skip=0, epoch=1, noise=0, **words):
    """Return the batches of an epoch that follow the first ``skip``."""
    control = begin_control(**words)
    control.wrap_loader(loader, "train")
    if skip:
        control.resume_epoch("train", epoch, batches=skip, cycled=bool)
    control.start_epoch("train", epoch)
    found = []
    for batch in loader:
        found.append(repr(batch))
        for _ in range(noise):  # what training draws
            random.random()
    control.release()
    return found


@pytest.mark.parametrize("per_sample", [False, True])
@pytest.mark.parametrize("kind", LOADERS.values(), ids=LOADERS.keys())
def test_an_epoch_continues_and_draws_by_its_place_alone(kind, per_sample):
    """With any number of workers; and the generators of the training are left alone."""
    straight = take(kind(), noise=3, per_sample=per_sample)
    for other in ({"seed": 2}, {"fit": 1}, {"epoch": 2}):
        assert take(kind(), per_sample=per_sample, **other) != straight
    seed_host(99)
    assert take(kind(**WORKERS[1]), skip=1, per_sample=per_sample) == straight[1:]
    for skip in (0, 1, len(straight) - 1, len(straight)):
        resumed = take(kind(), skip=skip, noise=1, per_sample=per_sample)
        assert resumed == straight[skip:]
    seed_host(5)
    expected = random.random()
    seed_host(5)
    take(kind(), per_sample=per_sample)
    assert random.random() == expected


class Loads(Draws):
    count = 0

    def __getitem__(self, index):
        self.count += 1
        return super().__getitem__(index)


def test_what_was_consumed_is_not_loaded_again():
    dataset = Loads()
    take(make(dataset), skip=2)
    assert dataset.count == SIZE - 6


class Kept(Draws):
    """A dataset, or a function that makes batches, that keeps a generator."""

    def __init__(self):
        self.rng = random.Random(1)

    def __call__(self, samples):
        return samples


class Stateful(DataLoader):
    """Says where it is, as torchdata's loader does."""

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


class OwnIteration(DataLoader):
    """Makes its batches without an iterator of torch."""

    def __iter__(self):
        return map(
            self.collate_fn, ([self.dataset[i] for i in part] for part in self.batch_sampler)
        )


class Sized(Stream):
    def __len__(self):
        return SIZE


@pytest.mark.parametrize(
    ("loader", "problem"),
    [
        (make, None),
        (lambda: make(Kept()), None),
        (lambda: make(Kept(), num_workers=2), r"its own generators \(dataset\.rng\)"),
        (lambda: make(collate_fn=Kept()), None),
        (lambda: make(collate_fn=Kept(), num_workers=2), r"generators \(collate_fn\.rng\)"),
        (lambda: make(Sized(), shuffle=False), "Sized does not save its position"),
        (lambda: [1, 2], "list does not save its position"),
        (lambda: Stateful(Sized(), batch_size=3), None),
        (lambda: Stateful(Stream(), batch_size=3), "Stream does not have __len__"),
        (lambda: Stateful(Sized(), batch_size=None), None),
        (lambda: OwnIteration(Draws(), batch_size=3), "loader of Draws iterates by methods of"),
        (lambda: Stateful(Sized(), batch_size=None, num_workers=1), "its own batches in workers"),
    ],
    ids=range(12),
)
def test_what_cannot_go_on_exactly_is_told(loader, problem):
    loader = loader()
    control = begin(loader)
    next(iter(loader))
    found = find_loader_problems(loader, within=True)
    control.release()
    assert len(found) == (problem is not None)
    assert problem is None or re.search(problem, found[0])
