"""Errors that other tests raise in processes of their own, raised in this one."""

import pytest

from lightning_d9m.adapters import autoload
from lightning_d9m.adapters.audit.op_arms import check_device
from lightning_d9m.adapters.audit.op_worker import plan_cases
from lightning_d9m.errors import SettingError, TooLateError


def test_an_audit_of_what_is_not_here():
    with pytest.raises(SettingError, match="--device is 'nowhere', on which torch"):
        check_device("nowhere")
    with pytest.raises(SettingError, match="--ops names 'no_such_op', which is no op"):
        next(plan_cases(["no_such_op"], ["float32"], quick=True))


@pytest.fixture
def asked(monkeypatch):
    """Ask for a deterministic run, in a process in which none has begun."""
    monkeypatch.setenv("LIGHTNING_D9M", "1")
    monkeypatch.setattr(autoload._State, "started", False)
    monkeypatch.setattr(autoload._State, "problem", None)
    return autoload.make_lightning_callbacks


def test_a_variable_that_was_set_after_torch_was_imported(asked):
    with pytest.raises(TooLateError, match="asks for a seed before the model is built"):
        asked()


def test_a_problem_of_the_start_stops_the_trainer(asked, monkeypatch):
    monkeypatch.setattr(autoload._State, "problem", ValueError())
    with pytest.raises(SettingError, match=r"cannot be obeyed: ValueError: no reason is given\."):
        asked()
