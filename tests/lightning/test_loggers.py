"""Every logger of Lightning's gets the weights' digest as text, and drift as a scalar."""

import re
from pathlib import Path

import pytest
import yaml
from lightning.pytorch import loggers
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def test_csv(fit, tmp_path):
    reference = fit().path
    ledger = fit(reference=reference, trainer_logger=loggers.CSVLogger(tmp_path, "log", "v"))
    written = tmp_path / "log" / "v"
    last = ledger.outcome(0).final.totals["weights"]
    assert yaml.safe_load((written / "hparams.yaml").read_text())["d9m/weights"] == last
    assert "d9m/drift" in (written / "metrics.csv").read_text()


def test_tensorboard(fit, tmp_path):
    reference = fit().path
    ledger = fit(
        reference=reference, trainer_logger=loggers.TensorBoardLogger(tmp_path, "log", "v")
    )
    events = EventAccumulator(str(tmp_path / "log" / "v")).Reload()
    texts = [
        event.tensor_proto.string_val[0].decode()
        for event in events.Tensors("d9m/weights/text_summary")
    ]
    assert len(texts) == 3
    assert texts[-1] == ledger.outcome(0).final.totals["weights"]
    assert [event.value for event in events.Scalars("d9m/drift")] == [0, 0, 0]


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
    assert run.data.tags["d9m/weights"] == ledger.outcome(0).final.totals["weights"]
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
    assert summary["d9m/weights"] == ledger.outcome(0).final.totals["weights"]
    assert summary["d9m/drift"] == 0


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


def test_a_logger_of_another_class_gets_metrics_only(fit):
    """The digest would replace the settings that the program has logged."""
    logger = Bare()
    fit(reference=fit().path, trainer_logger=logger)
    assert logger.settings is None
    assert logger.metrics["d9m/drift"] == 0
