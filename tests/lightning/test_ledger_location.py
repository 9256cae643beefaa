"""The folder of a run's ledger: never remote, and not among the checkpoints."""

import logging

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from trainings import QUIET, make_loader, make_model

from lightning_d9m import DeterminismCallback, LedgerError
from lightning_d9m.lightning.autoload.auto_callback import AddedCallback

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


def test_the_folder_of_the_checkpoints_holds_no_ledger(train, caplog):
    with caplog.at_level(logging.INFO):
        train(default_root_dir=train.root / "root", checkpoints=train.root / "root")
    assert [path.suffix for path in (train.root / "root").iterdir()] == [".ckpt"]
    assert (train.root / "cwd/d9m" / LEDGER).exists()
    assert "because" in caplog.text
    assert "LIGHTNING_D9M_LEDGER_DIR" in caplog.text


def test_a_remote_root_makes_no_local_folder_of_its_name(train):
    train(default_root_dir="memory://runs/one")
    assert [path.name for path in (train.root / "cwd").iterdir()] == ["d9m"]
    assert (train.root / "cwd/d9m" / LEDGER).exists()


def test_an_added_callback_leaves_nothing_in_the_working_folder_of_a_trainer_without_files(
    train, caplog
):
    """Lightning's own tests check that a Trainer without a logger leaves no file there."""
    with caplog.at_level(logging.INFO):
        train(kind=AddedCallback)
    assert list((train.root / "cwd").iterdir()) == []
    (folder,) = (train.root / "state/lightning_d9m").iterdir()
    assert folder.name.startswith("cwd-")
    assert (folder / LEDGER).exists()
    assert f"The ledger is written to {folder}" in caplog.text


@pytest.mark.parametrize("way", ["fast_dev_run", "validate"])
def test_a_checkpoint_callback_that_saves_nothing_does_not_count(train, way):
    if way == "validate":
        trainer = pl.Trainer(**QUIET | {"enable_checkpointing": True}, callbacks=[AddedCallback()])
        trainer.validate(make_model(validation_step=lambda *_: None), make_loader(shuffle=False))
    else:
        train(kind=AddedCallback, fast_dev_run=True, checkpoints="saved")
    assert list((train.root / "cwd").iterdir()) == []
    assert len(list((train.root / "state").glob("lightning_d9m/cwd-*/*-000"))) == 1


@pytest.mark.parametrize("root", ["memory://runs/one", "checkpoints"])
def test_an_added_callback_falls_back_to_the_folder_of_state(train, root):
    folder = train.root / root if "://" not in root else root
    train(kind=AddedCallback, default_root_dir=folder, checkpoints=train.root / "checkpoints")
    assert list((train.root / "cwd").iterdir()) == []
    assert [path.suffix for path in (train.root / "checkpoints").iterdir()] == [".ckpt"]
    assert len(list((train.root / "state").glob(f"lightning_d9m/cwd-*/{LEDGER}"))) == 1


@pytest.mark.parametrize(
    "options",
    [{"checkpoints": "saved"}, {"logger": CSVLogger("logs")}, {"default_root_dir": "root"}],
    ids=["checkpoints", "logs", "root"],
)
def test_an_added_callback_writes_where_the_trainer_does(train, options):
    train(kind=AddedCallback, **options)
    assert not (train.root / "state").exists()
    assert len(list((train.root / "cwd").rglob(LEDGER))) == 1


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
