"""The folder of a run's ledger: never remote, and not among the checkpoints."""

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from trainings import QUIET, make_loader, make_model

from lightning_d9m import DeterminismCallback, LedgerError
from lightning_d9m.lightning.callback import AddedCallback

LEDGER = "fit-000/rank-0.jsonl"


@pytest.fixture
def train(tmp_path, monkeypatch):
    """Return a function that trains one batch in the folder ``cwd``."""
    (tmp_path / "cwd").mkdir()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path / "cwd")
    monkeypatch.delenv("LIGHTNING_D9M_LEDGER_DIR", raising=False)

    def run(*, ledger_dir=None, checkpoints=None, kind=DeterminismCallback, **options):
        callbacks = [kind(ledger_dir=ledger_dir)]
        if checkpoints is not None:
            callbacks.append(ModelCheckpoint(dirpath=checkpoints))
            options["enable_checkpointing"] = True
        options = QUIET | {"max_epochs": 1, "limit_train_batches": 1} | options
        pl.Trainer(callbacks=callbacks, **options).fit(
            make_model(validation_step=lambda *_: None),
            make_loader(),
            make_loader(shuffle=False),
        )

    run.root = tmp_path
    return run


REMOTE, SAVED = "memory://runs/one", "a folder of checkpoints"
# The callback, the Trainer's options, and where the ledger is. A callback that the program has not
# passed leaves nothing in the working folder of a Trainer that writes nothing there.
PLACES = [
    (DeterminismCallback, {"default_root_dir": SAVED, "checkpoints": SAVED}, "cwd/d9m"),
    (DeterminismCallback, {"default_root_dir": REMOTE}, "cwd/d9m"),
    (AddedCallback, {}, "state/lightning_d9m"),
    (AddedCallback, {"fast_dev_run": True, "checkpoints": "saved"}, "state/lightning_d9m"),
    (AddedCallback, {"default_root_dir": REMOTE, "checkpoints": SAVED}, "state/lightning_d9m"),
    (AddedCallback, {"default_root_dir": SAVED, "checkpoints": SAVED}, "state/lightning_d9m"),
    (AddedCallback, {"checkpoints": "saved"}, "cwd"),
    (AddedCallback, {"logger": CSVLogger("logs")}, "cwd"),
    (AddedCallback, {"default_root_dir": "root"}, "cwd"),
]


@pytest.mark.parametrize(("kind", "options", "place"), PLACES)
def test_the_ledger_is_beside_the_checkpoints_or_where_the_trainer_writes(
    train, caplog, kind, options, place
):
    saved = train.root / "checkpoints"
    with caplog.at_level("INFO"):
        train(kind=kind, **{name: saved if own == SAVED else own for name, own in options.items()})
    (ledger,) = train.root.rglob(LEDGER)
    assert ledger.is_relative_to(train.root / place)
    assert ("Set LIGHTNING_D9M_LEDGER_DIR to choose" in caplog.text) == (place != "cwd")
    found = [path.name for path in (train.root / "cwd").iterdir()]
    assert place == "cwd" or found == (["d9m"] if place == "cwd/d9m" else [])
    assert not saved.exists() or [path.suffix for path in saved.iterdir()] == [".ckpt"]


def test_an_evaluation_saves_no_checkpoints(train):
    trainer = pl.Trainer(**QUIET | {"enable_checkpointing": True}, callbacks=[AddedCallback()])
    trainer.validate(make_model(validation_step=lambda *_: None), make_loader(shuffle=False))
    assert list((train.root / "cwd").iterdir()) == []
    assert len(list((train.root / "state").glob("lightning_d9m/cwd-*/validate-000"))) == 1


@pytest.mark.parametrize("by_variable", [True, False])
def test_a_remote_ledger_is_refused(train, monkeypatch, by_variable):
    if by_variable:
        monkeypatch.setenv("LIGHTNING_D9M_LEDGER_DIR", "s3://bucket/runs")
    with pytest.raises(LedgerError, match="'s3://bucket/runs'; allowed: a local folder") as caught:
        train(ledger_dir=None if by_variable else "s3://bucket/runs")
    assert "Set ledger_dir, or the variable LIGHTNING_D9M_LEDGER_DIR" in str(caught.value)
    assert list((train.root / "cwd").iterdir()) == []


def test_a_folder_that_cannot_be_made_names_the_variable(train):
    (train.root / "file").touch()
    with pytest.raises(LedgerError, match=r"No ledger can be made in .* LIGHTNING_D9M_LEDGER_DIR"):
        train(default_root_dir=train.root / "file")
