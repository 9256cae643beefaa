"""The variable of ``d9m audit model``, which switches control off."""

import lightning.pytorch as lightning
import pytest
import torch
from trainings import QUIET, make_loader, make_model

from lightning_d9m import DeterminismCallback
from lightning_d9m.hashing.digest import digest_value
from lightning_d9m.ledger.folder import read_ledger

pytestmark = [
    pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers"),
]


def fit(folder, **overrides):
    trainer = lightning.Trainer(
        max_epochs=2, callbacks=[DeterminismCallback(ledger_dir=folder)], **QUIET
    )
    model = make_model(**overrides)
    trainer.fit(model, make_loader(), make_loader(shuffle=False))
    return model


@pytest.fixture
def control_off(monkeypatch):
    monkeypatch.setenv("LIGHTNING_D9M_CONTROL", "off")


def test_control_off_seeds_and_records_but_switches_nothing(
    tmp_path, monkeypatch, control_off, new_process
):
    seen = []

    def look(self):
        seen.append((torch.are_deterministic_algorithms_enabled(), torch.initial_seed()))

    with pytest.warns(UserWarning, match="seeded and recorded, but not deterministic"):
        off = fit(tmp_path / "off", on_train_epoch_end=look)
    monkeypatch.delenv("LIGHTNING_D9M_CONTROL")
    new_process()
    on = fit(tmp_path / "on", on_train_epoch_end=look)
    assert [flag for flag, _ in seen] == [False, False, True, True]
    # The same draws: where nothing is nondeterministic both end at the same bits.
    assert digest_value(dict(off.named_parameters())) == digest_value(dict(on.named_parameters()))
    ledgers = [read_ledger(tmp_path / arm) for arm in ("off", "on")]
    assert [ledger.header.settings.get("control") for ledger in ledgers] == ["off", None]
