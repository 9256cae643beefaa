"""A resumed epoch goes on where it was, loads nothing again, and draws what it would have drawn."""

import random
import re

import pytest
from control.drawing import SIZE, WORKERS, BatchDraws, Draws, Stream, make, rows
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler

from lightning_d9m.control.data.loaders import LoaderControl, find_loader_problems
from lightning_d9m.control.seeding import seed_host


class Loads(Draws):
    """Counts what is loaded."""

    count = 0

    def __getitem__(self, index):
        self.count += 1
        return super().__getitem__(index)


class Collated:
    """A function that draws when it makes a batch."""

    def __call__(self, samples):
        return [*map(list, zip(*samples, strict=True)), [random.random()] * len(samples)]


class DrawnBatches:
    """A batch sampler of the user's that draws from Python's generator, batch by batch."""

    def __iter__(self):
        for _ in range(SIZE // 3):
            yield random.sample(range(SIZE), 3)

    def __len__(self):
        return SIZE // 3


def by(sampler):
    return lambda **words: make(shuffle=False, sampler=sampler(), **words)


def in_batches(sampler):
    return lambda **words: DataLoader(Draws(), batch_sampler=sampler(), **words)


LOADERS = {
    "shuffled": make,
    "batches at once": lambda **words: make(BatchDraws(), **words),
    "a collate function that draws": lambda **words: make(collate_fn=Collated(), **words),
    "replacement": by(lambda: RandomSampler(range(SIZE), replacement=True)),
    "a distributed sampler": by(lambda: DistributedSampler(range(2 * SIZE), 2, 1)),
    "a batch sampler": in_batches(lambda: BatchSampler(RandomSampler(range(SIZE)), 3, False)),
    "a batch sampler of the user's": in_batches(DrawnBatches),
    "no batches": lambda **words: DataLoader(Draws(), batch_size=None, shuffle=True, **words),
}


def take(loader, *, skip=0, epoch=1, noise=0, per_sample=False, seed=1, fit=0, stage="train"):
    """Return the batches of an epoch that follow the first ``skip``."""
    control = LoaderControl(seed, fit=fit, rank=0, per_sample_rng=per_sample)
    control.wrap_loader(loader, stage)
    if skip:
        control.resume_epoch(stage, epoch, batches=skip, cycled=bool)
    control.start_epoch(stage, epoch)
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
    for other in ({"seed": 2}, {"fit": 1}, {"stage": "validate"}, {"epoch": 2}):
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


def test_what_was_consumed_is_not_loaded_again():
    dataset = Loads()
    take(make(dataset), skip=2)
    assert dataset.count == SIZE - 6


def test_the_epochs_after_a_resumed_one_are_whole():
    def found(resumed):
        loader = make(**WORKERS[1])
        control = LoaderControl(1, fit=0, rank=0, per_sample_rng=False)
        control.wrap_loader(loader, "train")
        if resumed:
            control.resume_epoch("train", 1, batches=2, cycled=bool)
        drawn = []
        for epoch in (1, 2) if resumed else (0, 1, 2):
            control.start_epoch("train", epoch)
            drawn.append(rows(loader))
        control.release()
        return drawn

    straight, resumed = found(False), found(True)
    assert resumed == [straight[1][6:], straight[2]]


@pytest.mark.parametrize(
    ("skip", "words"), [*((skip, {}) for skip in (1, 4, 5, 8, 9)), (5, WORKERS[0])]
)
def test_a_loader_that_is_cycled_goes_on_in_the_right_round(skip, words):
    """Lightning begins the shorter of two loaders anew until the longer one ends."""

    def found(consumed):
        loader = make(**words)
        control = LoaderControl(1, fit=0, rank=0, per_sample_rng=False)
        control.wrap_loader(loader, "train")
        control.resume_epoch("train", 0, batches=consumed, cycled=lambda: True)
        control.start_epoch("train", 0)
        rounds = [repr(batch) for _ in range(3) for batch in loader]
        control.release()
        return rounds

    rest = found(0)[skip:]
    assert found(skip)[: len(rest)] == rest[: len(found(skip))]
    assert rest


class OwnGenerator(Draws):
    """A dataset that keeps a generator."""

    def __init__(self):
        self.rng = random.Random(1)


class OwnCollate:
    """A function that keeps a generator."""

    def __init__(self):
        self.rng = random.Random(1)

    def __call__(self, samples):
        return samples


class Unsized(Stream):
    """A stream."""


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
    """A stream that knows its length."""

    def __len__(self):
        return SIZE


@pytest.mark.parametrize(
    ("loader", "problem"),
    [
        (make, None),
        (lambda: make(OwnGenerator()), None),
        (lambda: make(OwnGenerator(), num_workers=2), r"its own generators \(dataset\.rng\)"),
        (lambda: make(collate_fn=OwnCollate()), None),
        (
            lambda: make(collate_fn=OwnCollate(), num_workers=2),
            r"its own generators \(collate_fn\.rng\)",
        ),
        (lambda: make(Sized(), shuffle=False), "Sized does not save its position"),
        (lambda: [1, 2], "list does not save its position"),
        (lambda: Stateful(Sized(), batch_size=3), None),
        (lambda: Stateful(Unsized(), batch_size=3), "Unsized does not have __len__"),
        (lambda: Stateful(Sized(), batch_size=None), None),
        (lambda: OwnIteration(Draws(), batch_size=3), "loader of Draws iterates by methods of"),
        (lambda: Stateful(Sized(), batch_size=None, num_workers=1), "its own batches in workers"),
    ],
    ids=range(12),
)
def test_what_cannot_go_on_exactly_is_told(loader, problem):
    loader = loader()
    control = LoaderControl(1, fit=0, rank=0, per_sample_rng=False)
    loader = control.wrap_loader(loader, "train")
    control.start_epoch("train", 0)
    next(iter(loader))
    found = find_loader_problems(loader, within=True)
    control.release()
    assert len(found) == (problem is not None)
    assert problem is None or re.search(problem, found[0])
