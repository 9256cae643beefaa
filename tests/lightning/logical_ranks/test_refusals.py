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
from lightning_d9m.engine.control.environment import threads_pinned

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


@pytest.mark.filterwarnings("ignore:Total length of `list`")
def test_an_empty_list_of_loaders_has_nothing_to_split(fit):
    fit(model=make_model(val_dataloader=lambda _: []))


def test_samplers_of_torch_are_split(fit):
    for sampler in (WeightedRandomSampler(torch.ones(16), 16), DistributedSampler(DATA, 2, 0)):
        words = {"options": {"find_unused_parameters": True}}  # which is not needed
        words["loader"] = DataLoader(DATA, batch_size=2, sampler=sampler)
        assert fit(**words).global_step == 2


def test_a_checkpoint_needs_the_same_logical_ranks_and_threads(fit, tmp_path):
    path = tmp_path / "saved.ckpt"
    fit().save_checkpoint(path)
    with pytest.raises(InexactResumeError, match="saved with logical_ranks=4; now it is 2"):
        fit(ranks=2, resumed=path, max_steps=8)
    threads = torch.get_num_threads() + 1
    with pytest.raises(
        InexactResumeError, match=f"saved with threads={threads - 1}; now it is {threads}"
    ):
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


def test_what_a_step_changes_is_named_once_unless_it_is_changed_alike_or_appended(fit):
    """Values that logical ranks change differently, and a queue, a lock and a file."""

    def change(model, batch):
        model.last = model(batch).sum()
        model.outputs["counter"] += 1
        model.outputs["all"].append(1)
        model.queue.put(1)
        model.lock.acquire(blocking=False)
        model.file.write(b"x")
        return model.last

    outputs = {"counter": 0, "all": []}
    kept = {
        "queue": queue.SimpleQueue(),
        "lock": threading.Lock(),
        "last": None,
        "outputs": outputs,
    }
    with tempfile.TemporaryFile() as file, warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        fit(make_model(change, file=file, norm=nn.BatchNorm1d(2), **kept))
    texts = [str(one.message) for one in seen if "A step changes" in str(one.message)]
    named = {text.split("'")[1]: text for text in texts}
    said = {"file": "of _io", "lock": "lock of _th", "queue": "SimpleQueue of _queue"}
    assert outputs == {"counter": 2, "all": [1] * 8}
    assert named.keys() == {"last", *said}
    assert len(texts) == 4
    assert named["last"].startswith("A step changes 'last' of BoringModel, and not")
    for name, what in said.items():
        assert what in named[name]


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
    model = make_model(
        outputs=[], predict_step=lambda model, batch, _: model.outputs.append(model(batch))
    )
    trainer = fit(model)
    with pytest.raises(SettingError, match="predict_step adds to 'outputs'"):
        trainer.predict(model, DataLoader(DATA, batch_size=2))
