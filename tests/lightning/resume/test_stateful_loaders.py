"""Loaders of torchdata's, which know where they are, are resumed within an epoch."""

import gc
from functools import partial

import numpy as np
import pytest
from ledger_runs import find_breaks
from torch.utils.data import IterableDataset, _utils, get_worker_info
from trainings import NoisyDigits

from lightning_d9m.errors import InexactResumeError

loaders = pytest.importorskip(
    "torchdata.stateful_dataloader", reason="torchdata is not installed; `pip install torchdata`"
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:Your `IterableDataset` has `__len__` defined:UserWarning"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),  # torchdata's own
]


@pytest.fixture(autouse=True)
def short_joins(monkeypatch):
    """Wait for workers of a loader in a garbage cycle, whose queues are closed, not 5 s each."""
    monkeypatch.setattr(_utils, "MP_STATUS_CHECK_INTERVAL", 0.2)
    yield
    gc.collect()


class Numbers(IterableDataset):
    """A stream of samples that says how many it gave, shared out among the workers."""

    given = 0
    start = 0

    def __len__(self):
        return 96

    def __iter__(self):
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        self.given, self.start = self.start, 0
        digits = NoisyDigits()
        for index in range(first + self.given * step, 96, step):
            self.given += 1
            yield digits[index]

    def state_dict(self):
        return {"given": self.given}

    def load_state_dict(self, state):
        self.start = state["given"]


def stream(**words):
    return loaders.StatefulDataLoader(Numbers(), batch_size=16, **words)


def mapped(**words):
    return loaders.StatefulDataLoader(NoisyDigits(), batch_size=16, shuffle=True, **words)


@pytest.mark.parametrize(
    ("kind", "words"), [(stream, {}), (stream, {"num_workers": 2}), (mapped, {})]
)
def test_a_loader_that_knows_its_place_is_resumed_within_an_epoch(fits, kind, words):
    places = ({"batch": 3}, {"hook": "on_train_epoch_end"})
    fits.check(*places, loader=partial(kind, **words))


class Counting(IterableDataset):
    """A stream that has no state, but counts its epochs, from which it draws its order."""

    epoch = -1

    def __len__(self):
        return 96

    def __iter__(self):
        self.epoch += 1
        order = np.random.default_rng(self.epoch).permutation(96)
        digits = NoisyDigits()
        return (digits[int(index)] for index in order)


def test_a_stream_that_counts_is_resumed_without_workers(fits):
    """The loader reads and skips the batches that were trained."""

    def count(**words):
        return loaders.StatefulDataLoader(Counting(), batch_size=16, **words)

    fits.check({"epoch": 2, "batch": 3}, {"hook": "on_train_epoch_end"}, loader=count)
    with pytest.raises(InexactResumeError, match="Counting does not have state_dict"):
        fits.fit(loader=partial(count, num_workers=1), resume=fits.folder / "0.ckpt")


class Continuing(Numbers):
    """A stream that begins each epoch at the position that it has loaded."""

    def __iter__(self):
        digits = NoisyDigits()
        for index in range(self.start, 96):
            self.given = index + 1
            yield digits[index]


@pytest.mark.parametrize(
    ("at", "lengths"),
    [
        ({"batch": 3}, "3 batches, and the epoch before 6"),
        ({"batch": 6}, "0 batches, and the epoch before 6"),
    ],
)
def test_a_loader_that_begins_later_epochs_at_the_checkpoint_is_an_error(fits, at, lengths):
    """Hugging Face's iterable datasets do without ``set_epoch``, and litData's loader does."""
    run = {"loader": lambda: loaders.StatefulDataLoader(Continuing(), batch_size=16)}
    fits.interrupt(**run, at={"epoch": 0, **at})
    with pytest.warns(UserWarning, match=f"Epoch 1 had {lengths}"):
        resumed = fits.resume(**run, words={"on_inexact_resume": "warn"})
    (_, late), _ = find_breaks(resumed / "rank-0.jsonl")
    assert [reason.partition(":")[0] for reason in late.inexact] == [f"Epoch 1 had {lengths}"]
    with pytest.raises(InexactResumeError, match=f"Epoch 1 had {lengths}"):
        fits.resume(**run)


class CountingLoader(loaders.StatefulDataLoader):
    """A loader whose order depends on the number of epochs that it has counted."""


def test_a_loader_of_another_library_is_not_resumed_between_epochs(fits):
    """Lightning leaves out its state there; litData's loader counts its epochs."""
    run = {"loader": lambda: CountingLoader(NoisyDigits(), batch_size=16)}
    fits.refuse(
        r"CountingLoader has a state_dict\(\), which", at={"hook": "on_train_epoch_end"}, **run
    )
    fits.interrupt(**run, at={"batch": 3})
    fits.resume(**run)
