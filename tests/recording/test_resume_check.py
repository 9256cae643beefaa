"""A resumed run that does not continue the run that saved its checkpoint ends, and says where."""

import os
import random
import shutil

import lightning.pytorch as L
import pytest
import torch
from recorded_loop import train
from resuming import Fits, make_saver
from trainings import make_model

from lightning_d9m import InexactResumeError
from lightning_d9m.engine.ledger.format.reader import RankReader
from lightning_d9m.engine.ledger.format.records import Resume, StepDigests
from lightning_d9m.engine.recording.resume_check import can_be_checked

HIDDEN = "D9M_TEST_HIDDEN"  # of the environment, which no checkpoint holds


@pytest.fixture
def fits(tmp_path, new_process, monkeypatch):
    def begin():
        monkeypatch.setenv(HIDDEN, "0")
        new_process()

    return Fits(tmp_path, begin)


def hiding(effect, first=0):
    """Return a model that counts its batches out of sight, and from ``first`` on acts by that."""

    def count(self, *_):
        number = int(os.environ[HIDDEN]) + 1
        os.environ[HIDDEN] = str(number)
        if self.trainer.global_step >= first and not self.trainer.sanity_checking:
            effect(self, number)

    return lambda: make_model(on_train_batch_start=count)


def scale(module, number):
    module.layers[0].weight.data.mul_(1 + number / 100)


def save(fits, **words):
    """Train, and save a checkpoint on the way; return the ledger's folder."""
    at = words.pop("at", {})
    words |= {"enable_checkpointing": True}
    return fits.fit(**words, extra=[make_saver(fits.checkpoint, **at, stop=False)])


def list_records(folder, kind):
    with RankReader(folder / "rank-0.jsonl") as reader:
        return [record for record in reader.read_lines() if isinstance(record, kind)]


WEIGHTS = r"weights 6 of 6 \(layers\.0\.bias, layers\.0\.weight, layers\.1\.bias and 3 more\)"
DIFFERENCES = {
    "within an epoch": ({}, hiding(scale), rf"in step 9 of epoch 1: {WEIGHTS}; "),
    "between epochs": (
        {"epoch": 0, "batch": 6, "hook": "on_train_epoch_end"},
        hiding(scale),
        rf"in step 7 of epoch 1: {WEIGHTS}; ",
    ),
    "generators alone": (
        {},
        hiding(lambda _, number: [random.random() for _ in range(number)]),
        r"in step 9 of epoch 1: .*generators 1 of 3 \(python\)",
    ),
    "after the first steps": ({}, hiding(scale, 12), r"in step 18 of epoch 2: weights 6 of 6"),
}


@pytest.mark.parametrize(("at", "model", "message"), DIFFERENCES.values(), ids=DIFFERENCES)
def test_a_resume_that_lacks_state_ends_at_the_first_step_that_differs(fits, at, model, message):
    save(fits, model=model, at=at)
    with pytest.raises(InexactResumeError, match=message) as caught:
        fits.resume(model=model)
    assert 'on_inexact_resume="warn"' in str(caught.value)


def test_a_deliberate_change_is_recorded_and_the_fit_continues(fits, monkeypatch):
    """A variable takes precedence over the argument of the program's own callback."""
    model = hiding(scale)
    save(fits, model=model)
    monkeypatch.setenv("LIGHTNING_D9M_ON_INEXACT_RESUME", "warn")
    with pytest.warns(UserWarning, match="in step 9 of epoch 1") as warned:
        folder = fits.resume(model=model, words={"on_inexact_resume": "raise"})
    assert sum("on_inexact_resume" in str(one.message) for one in warned) == 1
    assert fits.trainer.global_step == 18
    *_, last = list_records(folder, Resume)
    assert "in step 9" in last.inexact[0]
    # The first steps of this run, for a run that resumes from the same checkpoint.
    assert [record.step for record in list_records(folder, StepDigests)] == [9, 10, 11]


def test_steps_are_recorded_after_each_checkpoint_and_no_comparison_reads_them(fits):
    first = {"epoch": 0, "batch": 6, "hook": "on_train_epoch_end"}
    # With accumulation, a step is recorded when it is made.
    savers = [
        make_saver(fits.folder / f"{number}.ckpt", **at, stop=False)
        for number, at in enumerate([first, {"batch": 2}])
    ]
    straight = fits.fit(extra=savers, accumulate_grad_batches=2, enable_checkpointing=True)
    assert [own.step for own in list_records(straight, StepDigests)] == [4, 5, 6, 7]
    for number in (0, 1):
        resumed = fits.fit(resume=fits.folder / f"{number}.ckpt", accumulate_grad_batches=2)
        (resume,) = list_records(resumed, Resume)
        assert resume.unchecked is None


def test_a_run_that_ended_within_an_epoch_is_trained_further(fits):
    save(fits, max_steps=10)
    assert fits.resume(max_steps=-1)
    assert fits.trainer.global_step == 18


MISSING = {
    "it ended with the save": ({"stop": True}, None, "it ended before the step after that"),
    "its ledger was moved": ({}, shutil.move, "its ledger is not where the checkpoint says"),
    "another ledger is there": ({}, "replace", "is not the ledger that the checkpoint names"),
    "its ledger was edited": ({}, "edit", "its ledger cannot be read: "),
}


@pytest.mark.parametrize(("stop", "change", "reason"), MISSING.values(), ids=MISSING)
def test_a_resume_that_cannot_be_checked_says_so(fits, caplog, stop, change, reason):
    folder = fits.interrupt() if stop else save(fits)
    state = torch.load(fits.checkpoint, weights_only=True)["callbacks"]["lightning_d9m"]
    position = state["ranks"][0]["ledger"]
    assert can_be_checked(position, 0) == (not stop)
    if change == "edit":
        file = folder / "rank-0.jsonl"
        file.write_bytes(file.read_bytes().replace(b'"step":10', b'"step":11'))
    elif change is not None:
        shutil.move(folder, fits.folder / "moved")
        if change == "replace":
            assert fits.fit(max_epochs=1) == folder
        else:
            folder.mkdir()  # so that the next ledger has another name
    if change != "edit":
        assert not can_be_checked(position, 0)
    if change == "edit":
        with pytest.raises(
            InexactResumeError, match=r"the ledger of the run that .* cannot be read: "
        ):
            fits.resume()
        return
    resumed = fits.resume()
    assert f"cannot be compared with the run that saved the checkpoint: {reason}" in (
        caplog.text.replace(f"{folder}/rank-0.jsonl ", "")
    )
    (resume,) = list_records(resumed, Resume)
    assert reason in resume.unchecked


class Leave(L.Callback):
    """Saves a checkpoint and ends the fit, because the machine is taken away."""

    def __init__(self, path):
        self.path = path

    def on_train_epoch_end(self, trainer, *_):
        trainer.save_checkpoint(self.path)
        trainer.should_stop = True


def test_what_ended_the_run_right_after_the_save_is_said(fits, caplog):
    """Early stopping may do so, too; whether to train on is for the user to say."""
    fits.fit(extra=[Leave(fits.checkpoint)])
    (resume,) = list_records(fits.resume(), Resume)
    reason = "ended before the step after that, by trainer.should_stop, which Leave sets"
    assert reason in resume.unchecked
    assert reason in caplog.text


def test_a_loop_is_checked_too(tmp_path, new_process):
    kept = []
    train(tmp_path, stop=4, kept=kept)
    new_process()
    assert train(tmp_path, state=kept[0]).global_step == 12

    def disturb(model, _, step):
        if step == 5:
            model[0].weight.data[0, 0] += 1

    message = r"in step 6 of epoch 0: weights 6 of 6"
    new_process()
    with pytest.raises(InexactResumeError, match=message):
        train(tmp_path, state=kept[0], disturb=disturb)
    new_process()
    with pytest.warns(UserWarning, match=message):
        run = train(tmp_path, state=kept[0], disturb=disturb, on_inexact_resume="warn")
    assert "in step 6" in list_records(run.ledger, Resume)[-1].inexact[0]
