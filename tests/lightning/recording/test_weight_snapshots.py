"""The variables of ``d9m audit model``: control switched off, and weights kept."""

import lightning.pytorch as lightning
import pytest
import torch
from trainings import QUIET, make_loader, make_model

from lightning_d9m import DeterminismCallback, SettingError
from lightning_d9m.hashing.digest import digest_value
from lightning_d9m.ledger.folder import read_ledger
from lightning_d9m.lightning.recording.trainer_recorder import (
    load_weight_snapshot,
    weight_snapshot_path,
)

pytestmark = [
    pytest.mark.usefixtures("unseeded", "new_process"),
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


def test_weights_of_every_moment_are_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("LIGHTNING_D9M_KEEP_WEIGHTS", str(tmp_path / "weights"))
    model = fit(tmp_path)
    names = sorted(path.name for path in (tmp_path / "weights").iterdir())
    assert names == [
        "fit-000-epoch-000000.pt",
        "fit-000-epoch-000001.pt",
        "fit-000-final-000001.pt",
        "fit-000-initial-000000.pt",
    ]
    kept = load_weight_snapshot(weight_snapshot_path(tmp_path / "weights", "fit-000", "final", 1))
    assert digest_value(kept) == digest_value(dict(model.named_parameters()))


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


def test_a_value_that_is_neither(monkeypatch):
    monkeypatch.setenv("LIGHTNING_D9M_CONTROL", "no")
    with pytest.raises(SettingError, match="'no'; allowed: on or off"):
        DeterminismCallback()
