"""The callback that is added gives way to the program's own; what cannot be had is refused."""

import importlib
import logging
from importlib import metadata

import pytest
import torch
from trainings import QUIET, make_loader, make_model

from lightning_d9m import DeterminismCallback, SettingError, TooLateError, compatibility
from lightning_d9m.control.session import active_session, enable
from lightning_d9m.lightning.autoload import entry_points
from lightning_d9m.lightning.callback import make_callback
from lightning_d9m.lightning.trainer_session import resolve_seed


@pytest.fixture
def asked(monkeypatch):
    """Ask for determinism, and count as started."""
    monkeypatch.setenv("LIGHTNING_D9M", "1")
    monkeypatch.setattr(
        entry_points,
        "_AutoloadState",
        type("_State", (entry_points._AutoloadState,), {"started": True}),
    )
    return monkeypatch


def train(package, callbacks, folder):
    words = QUIET | {"max_epochs": 1, "default_root_dir": folder, "callbacks": callbacks}
    trainer = importlib.import_module(package).Trainer(**words)
    trainer.fit(make_model(package), make_loader(), make_loader(shuffle=False))
    return [c for c in trainer.callbacks if isinstance(c, DeterminismCallback)]


def test_lightning_does_not_log_that_it_adds_the_callback(asked, caplog):
    logger = logging.getLogger("lightning.fabric.utilities.registry")
    with caplog.at_level("INFO", logger.name):
        make_callback("lightning.pytorch").early_variables.restore()
        for name in ("other", "lightning_d9m"):
            logger.info("Adding 1 callbacks from entry point '%s': C", name)
    assert [record.message for record in caplog.records] == [
        "Adding 1 callbacks from entry point 'other': C"
    ]
    del asked


def test_variables_that_the_programs_own_callback_does_not_take_are_said(asked, tmp_path):
    asked.setenv("LIGHTNING_D9M_ON_DRIFT", "warn")
    asked.setenv("LIGHTNING_D9M_THREADS", "1")
    with pytest.warns(UserWarning, match="these variables are ignored: LIGHTNING_D9M_ON_DRIFT"):
        train("lightning.pytorch", [DeterminismCallback()], tmp_path)


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("LIGHTNING_D9M", "maybe", "The variable LIGHTNING_D9M is 'maybe'; allowed: 1 or 0."),
        ("LIGHTNING_D9M_SEED", "-1", r"seed is -1; .*settings come from LIGHTNING_D9M_SEED\.\)"),
        ("LIGHTNING_D9M_ON_DRIFT", "shrug", "is 'shrug'; allowed: raise or warn"),
        ("LIGHTNING_D9M_SEDE", "1", "Did you mean LIGHTNING_D9M_SEED?"),
    ],
)
def test_a_bad_variable_refuses_the_trainer(asked, variable, value, message):
    asked.setenv(variable, value)
    with pytest.raises(SettingError, match=message):
        entry_points.make_lightning_callbacks()


def test_a_door_that_stayed_shut_refuses_the_trainer(monkeypatch):
    """``TORCH_DEVICE_BACKEND_AUTOLOAD=0``: nothing was seeded before the model was built."""
    monkeypatch.setenv("LIGHTNING_D9M", "1")
    monkeypatch.setattr(
        entry_points,
        "_AutoloadState",
        type("_State", (entry_points._AutoloadState,), {"started": False}),
    )
    with pytest.raises(TooLateError, match="TORCH_DEVICE_BACKEND_AUTOLOAD is 0"):
        entry_points.make_pytorch_lightning_callbacks()


@pytest.mark.parametrize(
    ("place", "name", "value", "message"),
    [
        (torch, "__version__", "2.3.1", "torch is 2.3.1, and lightning_d9m needs 2.4 or later"),
        (metadata, "version", lambda _: "2.1.4", "lightning is 2.1.4, and lightning_d9m needs 2.2"),
        (compatibility, "imports_extensions", lambda: False, "loads no extensions when it is"),
    ],
    ids=["torch", "lightning", "extensions"],
)
def test_a_stack_that_is_too_old_is_said_once_and_the_program_goes_on(
    asked, capsys, place, name, value, message
):
    state = {"started": False, "unsupported": None}
    asked.setattr(entry_points, "_AutoloadState", type("_State", (), {"problem": None, **state}))
    asked.setattr(place, name, value)
    entry_points.load()
    assert entry_points.make_lightning_callbacks() == []
    assert active_session() is None
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("lightning_d9m: LIGHTNING_D9M=1 has no effect: ")
    assert message in line


@pytest.mark.parametrize("value", ["", "0", "off"])
def test_nothing_is_added_when_nothing_is_asked(monkeypatch, value):
    monkeypatch.setenv("LIGHTNING_D9M", value)
    assert entry_points.make_lightning_callbacks() == []


def test_a_seed_that_nobody_chose_gives_way_to_seed_everything(asked, monkeypatch):
    """Two runs with other seeds must not draw the same order of samples."""
    with enable(seed=0) as session:
        monkeypatch.setenv("PL_GLOBAL_SEED", "42")
        assert resolve_seed(None) == 0
        session.seed_is_default = True
        assert resolve_seed(None) == 42
        assert resolve_seed(7) == 7
        session.seed_is_default = False
        assert resolve_seed(None) == 0
    assert not torch.are_deterministic_algorithms_enabled()
    del asked
