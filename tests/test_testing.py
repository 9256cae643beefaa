"""``assert_bit_exact``: passes what is exact, and names the first place where runs part."""

import itertools
import os
import random

import lightning.pytorch as lightning
import numpy as np
import pytest
import torch
from ledger_runs import Runs
from torch import nn
from trainings import QUIET, make_loader, make_model

from lightning_d9m import (
    DeterminismCallback,
    NotBitExactError,
    SettingError,
    assert_bit_exact,
    deterministic,
    read_ledger,
)
from lightning_d9m.engine.control.session import active_session, next_fit
from lightning_d9m.engine.ledger.folder import LEDGER_VARIABLE, list_fits
from lightning_d9m.integrations.loop.optimizer_steps import OptimizerSteps
from lightning_d9m.testing import compare_fits


def train(model=None):
    """Train with the callback; its seed is the session's."""
    trainer = lightning.Trainer(max_epochs=2, callbacks=[DeterminismCallback()], **QUIET)
    trainer.fit(model or make_model(), make_loader(), make_loader(shuffle=False))
    return trainer


def test_an_exact_training_passes_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = torch.get_rng_state(), random.getstate(), next_fit()
    assert_bit_exact(train, runs=3, seed=4)
    assert active_session() is None
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert next_fit() == before[2] + 1
    assert not list(tmp_path.iterdir())
    assert "LIGHTNING_D9M_LEDGER_DIR" not in os.environ


def train_plain():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.randn(4, 2)).sum().backward()
        optimizer.step()
    return model


def test_a_plain_loop_is_exact_whose_steps_are_recorded(tmp_path, monkeypatch):
    """As with ``LIGHTNING_D9M=1``; the steps before and after it have their own ledgers."""
    monkeypatch.setenv(LEDGER_VARIABLE, str(tmp_path))
    steps = OptimizerSteps()
    with deterministic(seed=1):
        steps.install()
        try:
            train_plain()
            assert_bit_exact(train_plain, runs=3)
            train_plain()
        finally:
            steps.remove()
    ledgers = list(map(read_ledger, list_fits(tmp_path)))
    assert [ledger.outcome(0).end.status for ledger in ledgers] == ["finished"] * 2


def test_the_first_epoch_that_differs_is_named():
    fits = itertools.count()

    def one_bit_in_run_2(self):
        if self.current_epoch == 1 and run == 1:
            self.layers[0].weight.data.view(torch.int32)[0, 0] ^= 1

    def train_and_disturb():
        nonlocal run
        run = next(fits)
        train(make_model(on_train_epoch_start=one_bit_in_run_2))

    run = 0
    with pytest.raises(NotBitExactError) as caught:
        assert_bit_exact(train_and_disturb)
    # pytest shows lines of the test, and none of the package.
    shown = [entry.path for entry in caught.traceback.filter(caught)]
    assert {str(path) for path in shown} == {__file__}
    message = str(caught.value)
    assert "Run 2 of" in message
    assert "diverges first, in epoch 1" in message
    assert "layers.0.weight" in message


def test_parallel_fits_are_paired_by_content(tmp_path):
    """Processes that a run starts take the numbers of their ledgers in any order."""
    written = []
    for number, seeds in enumerate([(1, 2), (2, 1), (2, 3)]):
        run = Runs(tmp_path / str(number))
        written.append([run.write(seed=seed) for seed in seeds])
    assert compare_fits(written[0], written[1]) is None
    assert "seed" in compare_fits(written[0], written[2]).text


def test_what_a_function_returns_is_compared_without_a_ledger():
    drawn = np.random.default_rng()  # of the program's own, without a seed

    def build():
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        return {"model": model, "losses": [1.0, float(drawn.random())]}

    with pytest.raises(
        NotBitExactError, match=r"1 of 8 returned entries differ, the first result\.losses"
    ):
        assert_bit_exact(build)


def test_entries_of_one_name_are_all_compared():
    drawn = np.random.default_rng()
    with pytest.raises(NotBitExactError, match=r"1 of 2 returned entries differ"):
        assert_bit_exact(lambda: {1: torch.tensor(drawn.random()), "1": torch.zeros(1)})


@pytest.mark.parametrize("draw", [random.random, np.random.rand, lambda: torch.rand(2)])
def test_every_generator_is_seeded_for_each_run(draw):
    assert_bit_exact(draw)


@pytest.mark.parametrize(
    ("function", "runs", "error", "message"),
    [
        (lambda: None, 2, SettingError, "nothing to compare"),
        (lambda: {"a": [], "b": None}, 2, SettingError, "left a ledger, so there is nothing"),
        (lambda: lightning.Trainer(**QUIET), 2, SettingError, "Trainer that has trained no module"),
        *((dict, runs, SettingError, "whole number from 2") for runs in (1, True, 2.0)),
        (lambda: 1 / 0, 2, ZeroDivisionError, "division"),
    ],
)
def test_what_cannot_be_compared_is_an_error(function, runs, error, message):
    with pytest.raises(error, match=message):
        assert_bit_exact(function, runs=runs)
    assert active_session() is None


def test_a_function_that_clears_the_environment_does_not_hide_the_outcome(monkeypatch):
    monkeypatch.delenv(LEDGER_VARIABLE, raising=False)

    def clear():
        del os.environ[LEDGER_VARIABLE]
        raise ValueError("the outcome")

    with pytest.raises(ValueError, match="the outcome"):
        assert_bit_exact(clear)
    assert active_session() is None
