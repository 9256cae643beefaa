"""The callback shows itself: one line when a fit ends, and attributes."""

import logging

import pytest
from lightning.pytorch import Trainer
from trainings import QUIET, make_loader, make_model

from lightning_d9m import DeterminismCallback, deterministic
from lightning_d9m.ledger.folder import read_ledger


def list_lines(caplog):
    return [record.message for record in caplog.records if "d9m:" in record.message]


@pytest.mark.parametrize(("bar", "summary"), [(True, True), (False, True), (True, False)])
def test_one_line_when_a_fit_ends_with_and_without_a_progress_bar(
    tmp_path, caplog, monkeypatch, bar, summary
):
    monkeypatch.chdir(tmp_path)
    callback = DeterminismCallback(seed=3, ledger_dir="runs", summary=summary)
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
    line = f"d9m: 2 epochs recorded, weights {digest[:16]}, ledger runs/fit-000"
    assert list_lines(caplog) == [line] * summary


def test_the_line_of_a_second_fit_says_that_it_draws_other_numbers(tmp_path, caplog):
    words = QUIET | {"enable_progress_bar": True, "max_epochs": 1}

    def fit(folder):
        callback = DeterminismCallback(seed=3, ledger_dir=tmp_path / folder)
        Trainer(callbacks=[callback], **words).fit(
            make_model(), make_loader(), make_loader(shuffle=False)
        )
        return callback.digest

    with caplog.at_level(logging.INFO):
        first, second, third = map(fit, "abc")
        with deterministic(seed=3):
            repeated = fit("d")
    remedy = "train within `with lightning_d9m.deterministic(seed=3):`"
    assert [remedy in line for line in list_lines(caplog)] == [False, True, False, False]
    assert len({first, second, third}) == 3
    assert repeated == first
