"""Datasets that draw random numbers, and what a loader under control gives of them."""

import random

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from lightning_d9m.control.data.loaders import LoaderControl

SIZE = 12
WORKERS = [{"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}]


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
        assert control.wrap_loader(loader, stage) is loader
        found = []
        for epoch in range(start, start + count):
            control.start_epoch(stage, epoch)
            found.append(rows(loader))
        return found
    finally:
        control.release()


def begin(loader, epoch, *, per_sample=False):
    """Begin an epoch of a loader; return its control, which the test releases."""
    control = LoaderControl(1, fit=0, rank=0, per_sample_rng=per_sample)
    control.wrap_loader(loader, "train")
    control.start_epoch("train", epoch)
    return control


def make(dataset=None, **words):
    return DataLoader(dataset or Draws(), batch_size=3, **({"shuffle": True} | words))


def order(found):
    return [[int(row[0]) for row in epoch] for epoch in found]


def snapshot(loader):
    """Return every attribute of a loader and of its samplers."""
    found = {("loader", *item) for item in ((k, id(v)) for k, v in vars(loader).items())}
    for sampler in (loader.sampler, loader.batch_sampler):
        found |= {(id(sampler), k, id(v)) for k, v in vars(sampler or loader).items()}
    return found
