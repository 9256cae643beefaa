"""Errors of all commands that no test of one of them makes, at least not in this process."""

from types import SimpleNamespace

import pytest
from lightning.pytorch.strategies import FSDPStrategy

from lightning_d9m.errors import SettingError, TooLateError
from lightning_d9m.integrations.autoload import entry_points
from lightning_d9m.integrations.lightning.step_replay import Replay


def test_a_strategy_that_shards_is_not_replayed():
    class OwnStrategy(FSDPStrategy):
        """A user's."""

    model = SimpleNamespace(automatic_optimization=True)
    trainer = SimpleNamespace(strategy=object.__new__(OwnStrategy), lightning_module=model)
    with pytest.raises(SettingError, match="strategy is OwnStrategy, which divides the weights"):
        Replay(trainer, None)


def test_a_run_that_was_asked_for_too_late_and_one_that_did_not_start(monkeypatch):
    monkeypatch.setenv("LIGHTNING_D9M", "1")
    monkeypatch.setattr(entry_points._AutoloadState, "started", False)
    monkeypatch.setattr(entry_points._AutoloadState, "problem", None)
    with pytest.raises(TooLateError, match="asks for a seed before the model is built"):
        entry_points.make_callbacks("lightning.pytorch")
    monkeypatch.setattr(entry_points._AutoloadState, "problem", ValueError())
    with pytest.raises(SettingError, match=r"is not possible: ValueError: no reason is given\."):
        entry_points.make_callbacks("lightning.pytorch")
