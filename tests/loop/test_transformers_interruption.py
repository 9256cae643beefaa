"""A Trainer is surveyed, killed at a point, and resumed, as ``d9m repeat --interrupt`` does it."""

import pytest
from interruptions import KilledError, interrupt
from scripts import load_script
from transformers import Trainer

from lightning_d9m import SettingError, compare


@pytest.fixture(scope="module")
def example():
    """The module of the example."""
    return load_script("examples/transformers_trainer.py")


@pytest.fixture
def train(example, begin_run, tmp_path):
    """Return a function that trains under variables, as in a process of its own."""

    def run(*, interrupt="", resume="", **arguments):
        begin_run(interrupt, resume)
        given = {"num_train_epochs": 2, "save_strategy": "no", **arguments}
        return example.train(tmp_path / "runs", **given)

    return run


# 10 steps are an epoch.
def test_a_training_killed_at_a_point_ends_at_the_same_bits(train, tmp_path):
    original = Trainer.train
    points = {"epoch:0": 10, "batch:1:3": 13, "batch:0:4+8": 4}
    shapes, breaks = interrupt(train, tmp_path, *points)
    assert shapes == [(10, "step")] * 2
    assert [entry.step for entry in breaks] == list(points.values())
    assert Trainer.train is original


def test_what_the_program_resumes_from_gives_way_to_the_variable(train, tmp_path):
    with pytest.raises(KilledError):
        train(interrupt="batch:0:3", save_strategy="steps", save_steps=2)
    resumed = train(resume=tmp_path / "points/interrupted.ckpt")
    assert resumed.recorder.global_step == 20
    again = train()  # without the variable
    assert compare(again.ledger, resumed.ledger).ranks[0].actual.breaks[0].step == 3


def test_a_checkpoint_without_the_optimizer_is_refused(train):
    with pytest.raises(SettingError, match=r"Leave out save_only_model=True\.$"):
        train(interrupt="survey", save_only_model=True)


def test_a_trainer_that_does_not_resume_is_refused(example, train, tmp_path, monkeypatch):
    """A training from the start would prove nothing."""

    class Stubborn(Trainer):
        def train(self, resume_from_checkpoint=None):
            return self._inner_training_loop(self._train_batch_size, self.args)

    with pytest.raises(KilledError):
        train(interrupt="epoch:0")
    monkeypatch.setattr(Trainer, "train", Trainer.train)  # put back, because none is called
    monkeypatch.setattr(example, "Trainer", Stubborn)
    with pytest.raises(SettingError, match=r"Call super\(\)\.train"):
        train(resume=tmp_path / "points/interrupted.ckpt")


def test_a_checkpoint_that_does_not_exist_is_refused(train, tmp_path):
    with pytest.raises(SettingError, match=r"LIGHTNING_D9M_RESUME is '.*', which does not exist"):
        train(resume=tmp_path / "nothing")
