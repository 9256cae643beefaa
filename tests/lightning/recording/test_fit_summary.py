"""The callback shows itself: one line when a fit ends, and attributes."""

import logging

import pytest
from lightning.pytorch import Trainer
from trainings import QUIET, make_loader, make_model

from lightning_d9m import DeterminismCallback
from lightning_d9m.ledger.folder import read_ledger


@pytest.mark.usefixtures("new_process")
@pytest.mark.parametrize("bar", [True, False])
def test_one_line_when_a_fit_ends_unless_progress_bars_are_off(tmp_path, caplog, monkeypatch, bar):
    monkeypatch.chdir(tmp_path)
    callback = DeterminismCallback(seed=3, ledger_dir="runs")
    assert (callback.ledger, callback.digest) == (None, None)
    assert repr(callback) == "DeterminismCallback(ledger=None, digest=None)"
    words = QUIET | {"enable_progress_bar": bar, "max_epochs": 2}
    with caplog.at_level(logging.INFO):
        Trainer(callbacks=[callback], **words).fit(
            make_model(), make_loader(), make_loader(shuffle=False)
        )
    digest = read_ledger(callback.ledger).outcome(0).final.totals["weights"]
    assert callback.digest == digest
    assert callback.ledger.resolve() == tmp_path / "runs" / "fit-000"
    assert (
        repr(callback) == f"DeterminismCallback(ledger={str(callback.ledger)!r}, digest={digest!r})"
    )
    line = f"d9m: 2 epochs recorded, weights {digest[:8]}…, ledger runs/fit-000"
    assert [record.message for record in caplog.records if "d9m:" in record.message] == [line] * bar
