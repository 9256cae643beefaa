"""What workers and single samples draw depends on (seed, fit, rank, epoch, index) alone."""

import functools
import os
import random

import numpy as np
import pytest
import torch
from control.drawing import SIZE, WORKERS, BatchDraws, Draws, Stream, begin, epochs, make, rows
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from lightning_d9m import SettingError
from lightning_d9m.control.data.loaders import LoaderControl


@pytest.mark.parametrize("dataset", [BatchDraws, Stream])
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


class DrawnOrder(IterableDataset):
    """A stream that draws its order when it starts."""

    def __iter__(self):
        return iter(torch.randperm(SIZE).tolist())


@pytest.mark.parametrize("workers", WORKERS, ids=["workers", "persistent"])
def test_an_epoch_that_is_started_again_draws_the_same(workers):
    """Lightning 2.5 iterates a loader twice before it resumes; persistent workers live on."""
    loader = DataLoader(DrawnOrder(), batch_size=3, **workers)
    control = LoaderControl(1, fit=0, rank=0, per_sample_rng=False)
    control.wrap_loader(loader, "train")
    found = []
    for epoch in (0, 1):
        control.start_epoch("train", epoch)
        found.append([batch.tolist() for batch in loader])
        control.restart_epoch("train", epoch)
        assert [batch.tolist() for batch in loader] == found[epoch]
    control.release()
    assert found[0] != found[1]


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
    with pytest.raises(SettingError, match=r"gives <.*Key object.* integers, strings"):
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
    """Of what long-lived workers prefetched and nobody took, the next epoch draws nothing."""

    def found(workers):
        loader = make(Draws(), prefetch_factor=2, **workers)
        control = LoaderControl(1, fit=0, rank=0, per_sample_rng=False)
        control.wrap_loader(loader, "train")
        batches = []
        for epoch in range(3):
            control.start_epoch("train", epoch)
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
        control = begin(loader, 0)
        twice = rows(loader), rows(loader)
        control.release()
        return twice

    first, second = found()
    assert not {row[1:] for row in first} & {row[1:] for row in second}
    assert found() == (first, second)


@pytest.fixture
def spawned_quickly(monkeypatch, forking_python):
    """Let ``spawn`` and ``forkserver`` start a Python that has imported torch."""
    monkeypatch.setattr("multiprocessing.spawn._python_exe", os.fsencode(forking_python))


class Marked(Draws):
    """Each sample also says what the user's function for workers left in the dataset."""

    mark = 0.0

    def __getitem__(self, index):
        return [*super().__getitem__(index), self.mark]


def mark(worker, *, by):
    """A user's function for workers, called after they are seeded."""
    get_worker_info().dataset.mark = random.random() + by


@pytest.mark.usefixtures("spawned_quickly")
def test_workers_that_are_spawned_draw_the_same_and_call_the_users_function():
    def found(by, context):
        init = functools.partial(mark, by=by)
        words = {"num_workers": 1, "multiprocessing_context": context}
        return epochs(make(Marked(), worker_init_fn=init, **words), count=1, per_sample=True)[0]

    zero, one = found(0, "fork"), found(1, "spawn")
    assert [row[4] + 1 for row in zero] == [row[4] for row in one]
    assert [row[:4] for row in zero] == [row[:4] for row in one]  # a batch has a seed of its own
