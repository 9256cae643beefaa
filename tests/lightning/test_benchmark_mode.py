"""cuDNN's benchmark mode: an error with the program's callback, else switched off."""

import logging

import lightning.pytorch as pl
import pytest
import torch
from trainings import QUIET, make_loader, make_model

from lightning_d9m import DeterminismCallback, SettingError
from lightning_d9m.ledger.folder import read_ledger
from lightning_d9m.lightning.autoload.auto_callback import AddedCallback


@pytest.fixture(autouse=True)
def benchmark_restored(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)


def train(folder, callback, model=None, **options):
    options = QUIET | {"max_epochs": 1, "default_root_dir": folder} | options
    trainer = pl.Trainer(callbacks=[callback], **options)
    trainer.fit(model or make_model(), make_loader(), make_loader(shuffle=False))


def test_the_added_callback_switches_it_off_logs_records_and_restores_it(tmp_path, caplog):
    during = []
    model = make_model(
        on_train_start=lambda self: during.append(torch.backends.cudnn.benchmark),
    )
    with caplog.at_level(logging.INFO):
        train(tmp_path, AddedCallback(), model, benchmark=True)
    assert during == [False]
    assert torch.backends.cudnn.benchmark
    (line,) = [r.message for r in caplog.records if "benchmark" in r.message]
    assert "as benchmark=True of this or of an earlier Trainer leaves it" in line
    assert read_ledger(tmp_path / "d9m").header.settings["overridden"] == "cudnn.benchmark"


def test_a_run_without_it_records_nothing_and_is_comparable(tmp_path, new_process):
    train(tmp_path / "a", AddedCallback())
    reference = tmp_path / "a/d9m/fit-000"
    assert "overridden" not in read_ledger(reference).header.settings
    new_process()
    train(tmp_path / "b", AddedCallback(reference=reference), benchmark=True)


def test_a_callback_of_the_program_names_this_trainer(tmp_path):
    with pytest.raises(SettingError, match="Remove benchmark=True from that Trainer") as e:
        train(tmp_path, DeterminismCallback(), benchmark=True)
    assert "\n" not in str(e.value)
