"""What logical ranks do not support is refused before training, on any number of processes."""

import json
import os
import queue
import re
import tempfile
import threading
import warnings
from pathlib import Path

import lightning as L
import logical_refusals
import pytest
import torch
from logical_refusals import DATA, REFUSALS, SEVERAL, make_model
from rank_processes import run_ranks
from torch import nn
from torch.utils.data import DataLoader, WeightedRandomSampler
from torch.utils.data.distributed import DistributedSampler
from trainings import QUIET

from lightning_d9m import (
    DDPDeterministicStrategy,
    DeterminismCallback,
    InexactResumeError,
    SettingError,
    read_ledger,
)
from lightning_d9m.control.torch_flags import threads_pinned
from lightning_d9m.lightning.logical_ranks.loaders import group_loader
from lightning_d9m.logical_ranks.tree import Blocks

SCRIPT = Path(logical_refusals.__file__)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Return what one process with four logical ranks found, and each of two with one."""
    folder = tmp_path_factory.mktemp("refusals")
    for count in (1, 2):
        run_ranks(SCRIPT, count, folder)
    files = {name: folder / f"found-{name}.json" for name in ("1-0", "2-0", "2-1")}
    return {name: json.loads(path.read_text()) for name, path in files.items()}


@pytest.mark.parametrize("message", [*REFUSALS, *SEVERAL])
def test_a_program_is_refused_on_one_and_on_two_processes(found, message):
    for process, messages in found.items():
        if message in messages or message in REFUSALS:
            text = messages[message]
            assert re.search(message, str(text)), f"{process}: {text}"
    assert message in found["2-1"]


def test_a_plain_training_after_all_refusals_is_accepted(found):
    assert [messages["none"] for messages in found.values()] == [2, 4, 4]


def test_a_collective_can_be_called_after_a_step_that_was_refused(fit):
    message = next(text for text in REFUSALS if "all_reduce" in text)
    with pytest.raises(SettingError, match=message):
        fit(**REFUSALS[message]())
    logical_refusals.all_reduce(torch.ones(1))
    torch.distributed.all_reduce(torch.ones(1))


def test_options_that_logical_ranks_do_not_need_are_accepted(fit):
    assert fit(options={"find_unused_parameters": True}).global_step == 2


def test_samplers_of_torch_are_split(fit):
    for sampler in (WeightedRandomSampler(torch.ones(16), 16), DistributedSampler(DATA, 2, 0)):
        assert fit(loader=DataLoader(DATA, batch_size=2, sampler=sampler)).global_step == 2


def test_sparse_gradients_are_summed_as_dense_ones(fit):
    model = make_model(
        lambda model, batch: model.table(torch.tensor([1, 1, 2])).sum(),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        table=nn.Embedding(4, 2, sparse=True),
    )
    before = model.table.weight.detach().clone()
    fit(model)
    # Each of two steps adds the gradient of all logical ranks, divided by their number.
    expected = before - 0.2 * torch.tensor([0.0, 2.0, 1.0, 0.0])[:, None]
    assert torch.allclose(model.table.weight, expected)


def test_a_checkpoint_needs_the_same_logical_ranks_and_threads(fit, tmp_path):
    path = tmp_path / "saved.ckpt"
    fit().save_checkpoint(path)
    with pytest.raises(InexactResumeError, match="saved with logical_ranks=4; now it is 2"):
        fit(ranks=2, resumed=path, max_steps=8)
    threads = torch.get_num_threads() + 1
    with pytest.raises(InexactResumeError, match=f"CPU threads; now they have {threads}"):
        fit(callbacks=[DeterminismCallback(threads=threads)], resumed=path)


def test_the_threads_are_not_those_that_an_earlier_fit_left_in_the_variable(
    fit, tmp_path, monkeypatch
):
    """Lightning's launcher sets the variable, if it is not set, to the cores of each process."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    with threads_pinned(torch.get_num_threads()):  # the launcher sets torch's number, too
        threads = [fit().strategy.logical_threads]
        monkeypatch.setenv("OMP_NUM_THREADS", str(int(os.environ["OMP_NUM_THREADS"]) + 2))
        threads.append(fit().strategy.logical_threads)
    runs = [read_ledger(path) for path in sorted(tmp_path.rglob("fit-*"))]
    assert [run.header.settings["threads"] for run in runs] == threads
    assert threads[0] == threads[1]


def test_the_variable_sets_the_number_of_logical_ranks(monkeypatch):
    monkeypatch.setenv("LIGHTNING_D9M_LOGICAL_RANKS", "6")
    strategy = L.Trainer(strategy="ddp_d9m", devices=1, **QUIET).strategy
    assert isinstance(strategy, DDPDeterministicStrategy)
    assert strategy.logical_ranks == 6
    monkeypatch.setenv("LIGHTNING_D9M_LOGICAL_RANKS", "six")
    with pytest.raises(SettingError, match="LIGHTNING_D9M_LOGICAL_RANKS is 'six'"):
        DDPDeterministicStrategy()
    monkeypatch.delenv("LIGHTNING_D9M_LOGICAL_RANKS")
    assert DDPDeterministicStrategy().logical_ranks is None


def test_the_variable_is_refused_by_a_strategy_that_does_not_read_it(fit, monkeypatch):
    monkeypatch.setenv("LIGHTNING_D9M_LOGICAL_RANKS", "6")
    with pytest.raises(SettingError, match="'6', but the Trainer has the strategy SingleDevice"):
        fit(strategy="auto")


def change_nothing(model, batch):
    return model(batch).sum()


def count(model, batch):
    model.counter += 1
    return model(batch).sum()


def collect(model, batch):
    model.outputs.append(1)
    return model(batch).sum()


def keep_loss(model, batch):
    model.last = model(batch).sum()
    return model.last


def test_what_logical_ranks_change_differently_is_named_once(fit):
    model = make_model(keep_loss, last=None)
    with pytest.warns(UserWarning, match="A step changes 'last' of BoringModel, and not") as seen:
        fit(model)
    assert sum("A step changes" in str(one.message) for one in seen) == 1


@pytest.mark.parametrize(
    ("make", "change", "name"),
    [
        (queue.Queue, lambda kept: kept.put(1), "a Queue of queue"),
        (threading.Lock, lambda kept: kept.acquire(blocking=False), "a lock of _thread"),
        (tempfile.TemporaryFile, lambda kept: kept.write(b"x"), "of _io"),
    ],
)
def test_a_queue_a_lock_and_a_file_that_a_step_changes_are_named(fit, make, change, name):
    def change_kept(model, batch):
        change(model.kept)
        return model(batch).sum()

    kept = make()
    with pytest.warns(UserWarning, match=f"A step changes 'kept', .*{name}, whose state is not"):
        fit(make_model(change_kept, kept=kept))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        fit(make_model(change_nothing, kept=kept))
    assert not [one for one in seen if "A step changes" in str(one.message)]
    getattr(kept, "close", int)()


@pytest.mark.parametrize("step", [change_nothing, count, collect])
def test_what_they_change_alike_or_append_is_accepted(fit, step):
    model = make_model(step, counter=0, outputs=[], norm=nn.BatchNorm1d(2))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        fit(model)
    assert not [one for one in seen if "A step changes" in str(one.message)]
    assert (model.counter, len(model.outputs)) in [(0, 0), (2, 0), (0, 8)]


def test_weights_that_are_first_changed_after_the_compared_steps_are_refused(fit):
    def change_late(model, batch):
        if model.global_step == 3:
            model.layer.weight.detach().mul_(2)
        return model(batch).sum()

    with pytest.raises(SettingError, match=r"the trained parameter 'layer\.weight' for the"):
        fit(make_model(change_late), max_epochs=2)


def test_fewer_samples_than_logical_ranks_are_predicted_once(fit):
    batches = fit(predicted=3).found
    assert [[part.shape for part in batch] for batch in batches] == [[(1, 2)] * 3]


def test_predictions_that_are_appended_to_a_list_are_refused(fit):
    model = make_model(change_nothing, outputs=[])
    model.predict_step = lambda batch, batch_idx: model.outputs.append(model(batch))
    trainer = fit(model)
    with pytest.raises(SettingError, match="predict_step adds to 'outputs'"):
        trainer.predict(model, DataLoader(DATA, batch_size=2))


def test_more_processes_than_logical_ranks_are_refused(monkeypatch):
    strategy = DDPDeterministicStrategy(logical_ranks=2)
    monkeypatch.setattr(type(strategy), "world_size", 3)
    with pytest.raises(SettingError, match="There are 3 processes, but only 2 logical ranks"):
        strategy.blocks  # noqa: B018 - it raises


def test_fewer_samples_than_processes_are_refused():
    data = range(2)
    loader = DataLoader(data, sampler=DistributedSampler(data, 1, 0))
    with pytest.raises(SettingError, match="There are 2 samples, and the last of 4 processes"):
        group_loader(loader, Blocks(4, 4), 0, padded=False)
