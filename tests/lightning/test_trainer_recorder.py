"""The recorder of a Trainer shows itself: in loggers, in one line, and not in progress bars."""

import re
from pathlib import Path

import pytest
import yaml
from lightning.pytorch import Trainer, loggers
from lightning.pytorch.callbacks import Callback, RichProgressBar, TQDMProgressBar
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from trainings import QUIET, make_loader, make_model

from lightning_d9m import DeterminismCallback, deterministic
from lightning_d9m.ledger.folder import read_ledger

WEIGHTS = "d9m/weights"


class Bare(loggers.logger.Logger):
    """A logger without an experiment, which keeps what it gets last."""

    name, version = "bare", 0

    def __init__(self):
        super().__init__()
        self.settings, self.metrics = None, {}

    def log_hyperparams(self, params, *_, **__):
        self.settings = params

    def log_metrics(self, metrics, step=None):
        self.metrics |= metrics


def test_csv_tensorboard_and_a_logger_of_another_class(fit, tmp_path):
    """The last one gets metrics only: the digest would replace what the program has logged."""
    folder, bare = tmp_path / "log" / "v", Bare()
    kinds = loggers.CSVLogger, loggers.TensorBoardLogger
    given = [*(kind(tmp_path, "log", "v") for kind in kinds), bare]
    last = fit(reference=fit().path, trainer_logger=given).outcome(0).final.totals["weights"]
    assert yaml.safe_load((folder / "hparams.yaml").read_text())[WEIGHTS] == last
    assert "d9m/drift" in (folder / "metrics.csv").read_text()
    events = EventAccumulator(str(folder)).Reload()
    texts = [
        event.tensor_proto.string_val[0] for event in events.Tensors(f"{WEIGHTS}/text_summary")
    ]
    assert (len(texts), texts[-1].decode()) == (3, last)
    assert [event.value for event in events.Scalars("d9m/drift")] == [0, 0, 0]
    assert (bare.settings, bare.metrics["d9m/drift"]) == (None, 0)


@pytest.fixture
def keep_report(tmp_path, monkeypatch):
    """The function that docs/report.md shows; a report is in the working folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "report.html").write_text("<!doctype html><title>d9m</title>")
    page = (Path(__file__).parents[2] / "docs" / "report.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    names = {}
    exec(code, names)  # noqa: S102 - the page's own
    return names["keep_report"]


def set_for_itself(monkeypatch, *names):
    """Remove at the end what a logger's package sets and leaves."""
    for name in names:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def test_mlflow(fit, tmp_path, monkeypatch, keep_report):
    from mlflow.tracking import MlflowClient

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    set_for_itself(monkeypatch, "MLFLOW_TRACKING_URI")
    uri = f"file:{tmp_path / 'mlruns'}"
    reference = fit().path
    logger = loggers.MLFlowLogger("digits", tracking_uri=uri)
    ledger = fit(reference=reference, trainer_logger=logger)
    run = MlflowClient(uri).get_run(logger.run_id)
    assert run.data.tags[WEIGHTS] == ledger.outcome(0).final.totals["weights"]
    assert run.data.metrics["d9m/drift"] == 0
    keep_report(logger)
    (kept,) = tmp_path.glob("mlruns/*/*/artifacts/report.html")
    assert kept.read_text() == Path("report.html").read_text()


def test_wandb_offline(fit, tmp_path, monkeypatch, keep_report):
    import wandb

    monkeypatch.setenv("WANDB_SILENT", "true")
    set_for_itself(monkeypatch, "WANDB_SERVICE", "WANDB_MODE")
    reference = fit().path
    logger = loggers.WandbLogger("digits", save_dir=tmp_path, offline=True)
    ledger = fit(reference=reference, trainer_logger=logger)
    summary = dict(logger.experiment.summary)
    keep_report(logger)
    wandb.finish()
    (kept,) = tmp_path.glob("wandb/offline-run-*/files/media/html/**/*.html")
    assert kept.read_text() == Path("report.html").read_text()
    assert summary[WEIGHTS] == ledger.outcome(0).final.totals["weights"]
    assert summary["d9m/drift"] == 0


def list_lines(caplog):
    return [record.message for record in caplog.records if "d9m:" in record.message]


@pytest.mark.parametrize("summary", [True, False])
def test_one_line_when_a_fit_ends(tmp_path, caplog, monkeypatch, summary):
    monkeypatch.chdir(tmp_path)
    callback = DeterminismCallback(seed=3, ledger_dir="runs", summary=summary)
    assert (callback.ledger, callback.digest) == (None, None)
    assert repr(callback) == "DeterminismCallback(ledger=None, digest=None)"
    trainer = Trainer(callbacks=[callback], **QUIET, max_epochs=2)
    with caplog.at_level("INFO"):
        trainer.fit(make_model(), make_loader(), make_loader(shuffle=False))
    digest = read_ledger(callback.ledger).outcome(0).final.totals["weights"]
    assert callback.digest == digest
    assert callback.ledger.resolve() == tmp_path / "runs" / "fit-000"
    shown = f"ledger={str(callback.ledger)!r}, digest={digest!r}"
    assert repr(callback) == f"DeterminismCallback({shown})"
    line = f"d9m: 2 epochs recorded, weights {digest[:16]}, ledger runs/fit-000"
    assert list_lines(caplog) == [line] * summary


def test_the_line_of_a_second_fit_says_that_it_draws_other_numbers(tmp_path, caplog):
    def fit(folder):
        callback = DeterminismCallback(seed=3, ledger_dir=tmp_path / folder)
        trainer = Trainer(callbacks=[callback], **QUIET, max_epochs=1)
        trainer.fit(make_model(), make_loader(), make_loader(shuffle=False))
        return callback.digest

    with caplog.at_level("INFO"):
        first, second, third = map(fit, "abc")
        with deterministic(seed=3):
            repeated = fit("d")
    remedy = "train within `with lightning_d9m.deterministic(seed=3):`"
    assert [remedy in line for line in list_lines(caplog)] == [False, True, False, False]
    assert len({first, second, third}) == 3
    assert repeated == first


def step(self, batch, batch_idx):
    images, classes = batch
    loss = nn.functional.cross_entropy(self.layers(images), classes)
    self.log("shown", loss, prog_bar=True)
    return loss


class Watch(Callback):
    """Note at each batch what the bar shows, and how far it has come."""

    def __init__(self, bar):
        self.bar = bar
        self.seen = []

    def on_train_batch_end(self, trainer, module, *_):
        if isinstance(self.bar, RichProgressBar):
            task = self.bar.progress.tasks[self.bar.train_progress_bar_id]
            place = task.completed, task.total
        else:
            place = self.bar.train_progress_bar.n, self.bar.train_progress_bar.total
        self.seen.append((*place, sorted(self.bar.get_metrics(trainer, module))))


@pytest.mark.parametrize("kind", [TQDMProgressBar, RichProgressBar])
def test_a_progress_bar_stays_whole(kind, tmp_path, capfd):
    def run(*ours):
        watch = Watch(kind(refresh_rate=1))
        words = QUIET | {"enable_progress_bar": True}
        callbacks = [*ours, watch.bar, watch]
        trainer = Trainer(max_epochs=1, default_root_dir=tmp_path, callbacks=callbacks, **words)
        trainer.fit(make_model(training_step=step), make_loader(), make_loader(shuffle=False))
        written = "".join(capfd.readouterr())
        assert "Epoch 0" in written
        return watch.seen, written

    plain, _ = run()
    ours, written = run(DeterminismCallback(ledger_dir=tmp_path, probes=("loss",), replay_every=3))
    assert ours == plain
    assert [place for *place, _ in ours] == [[number, 6] for number in (1, 2, 3, 4, 5, 6)]
    assert all(shown == ["shown"] for *_, shown in ours)
    logged = ("PYTHONHASHSEED was", "d9m: 1 epoch recorded")  # before and after the bars
    rest = [line for line in written.splitlines() if not any(text in line for text in logged)]
    assert "d9m" not in "\n".join(rest)
