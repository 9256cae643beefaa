"""The recorder of a Trainer: its ledgers' folder, evaluations, loggers, one line, progress bars."""

import re
from pathlib import Path
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch
import yaml
from lightning.pytorch import loggers
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, RichProgressBar, TQDMProgressBar
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from trainings import QUIET, make_loader, make_model

from lightning_d9m import DeterminismCallback, LedgerError, deterministic
from lightning_d9m.engine.ledger.folder import list_evaluations, list_fits, read_ledger
from lightning_d9m.engine.ledger.format.records import Evaluation
from lightning_d9m.integrations.lightning.callback import AddedCallback
from lightning_d9m.integrations.lightning.trainer_recorder import log_digest
from lightning_d9m.tools.comparison.ledgers import compare_ledgers

WEIGHTS = "d9m/weights"
pytestmark = pytest.mark.filterwarnings("ignore:The .*_dataloader. does not have many workers")


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
def test_one_line_when_a_fit_ends(fit, tmp_path, caplog, monkeypatch, summary):
    monkeypatch.chdir(tmp_path)
    callback = DeterminismCallback()
    assert (callback.ledger, callback.digest) == (None, None)
    assert repr(callback) == "DeterminismCallback(ledger=None, digest=None)"
    callback.early_variables.restore()
    with caplog.at_level("INFO"):
        digest = fit(ledger_dir="runs", summary=summary).outcome(0).final.totals["weights"]
    callback = fit.callback
    assert (callback.digest, callback.ledger.resolve()) == (digest, tmp_path / "runs" / "fit-000")
    shown = f"ledger={str(callback.ledger)!r}, digest={digest!r}"
    assert repr(callback) == f"DeterminismCallback({shown})"
    line = f"d9m: 2 epochs recorded, weights {digest[:16]}, ledger runs/fit-000"
    assert list_lines(caplog) == [line] * summary


def test_the_line_of_a_second_fit_says_that_it_draws_other_numbers(fit, caplog):
    def digest(*, again=True):
        fit(again=again)
        return fit.callback.digest

    with caplog.at_level("INFO"):
        first, second, third = digest(again=False), digest(), digest()
        with deterministic(seed=3):
            repeated = digest()
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
        trainer = pl.Trainer(max_epochs=1, default_root_dir=tmp_path, callbacks=callbacks, **words)
        trainer.fit(make_model(training_step=step), make_loader(), make_loader(shuffle=False))
        written = "".join(capfd.readouterr())
        assert "Epoch 0" in written
        return watch.seen, written

    plain, _ = run()
    ours, written = run(DeterminismCallback(ledger_dir=tmp_path, probes=("loss",)))
    assert ours == plain
    assert [place for *place, _ in ours] == [[number, 6] for number in (1, 2, 3, 4, 5, 6)]
    assert all(shown == ["shown"] for *_, shown in ours)
    logged = ("PYTHONHASHSEED was", "d9m: 1 epoch recorded")  # before and after the bars
    rest = [line for line in written.splitlines() if not any(text in line for text in logged)]
    assert "d9m" not in "\n".join(rest)


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
            make_model(validation_step=lambda *_: None), make_loader(), make_loader(shuffle=False)
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
    (AddedCallback, {"logger": loggers.CSVLogger("logs")}, "cwd"),
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
    reasons = {SAVED: "folder of the checkpoints", REMOTE: "local folder", None: "working folder"}
    # Of three possible reasons, only the one that holds is given.
    given = [
        said for said in reasons.values() if said in caplog.text.replace("working folder in", "")
    ]
    assert given == ([reasons[options.get("default_root_dir")]] if place != "cwd" else [])
    found = [path.name for path in (train.root / "cwd").iterdir()]
    assert place == "cwd" or found == (["d9m"] if place == "cwd/d9m" else [])
    assert not saved.exists() or [path.suffix for path in saved.iterdir()] == [".ckpt"]


def test_an_evaluation_saves_no_checkpoints(train):
    trainer = pl.Trainer(**QUIET | {"enable_checkpointing": True}, callbacks=[AddedCallback()])
    trainer.validate(make_model(validation_step=lambda *_: None), make_loader(shuffle=False))
    callback = trainer.callbacks[0]
    found = read_ledger(callback.ledger)
    assert found.path.name == "validate-000"
    assert callback.digest == found.outcome(0).final.totals["weights"]
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


def evaluate(verb, folder, model=None, loader=None, **settings):
    callback = DeterminismCallback(seed=3, ledger_dir=folder, **settings)
    trainer = pl.Trainer(callbacks=[callback], **QUIET)
    loader = make_loader(shuffle=False) if loader is None else loader
    getattr(trainer, verb)(make_model() if model is None else model, loader)
    return read_ledger(list_evaluations(folder)[-1])


def evaluations(ledger):
    return [record.as_record() for record in ledger.records(0) if isinstance(record, Evaluation)]


@pytest.mark.parametrize("verb", ["validate", "test", "predict"])
def test_an_evaluation_leaves_a_ledger_of_its_own(verb, tmp_path):
    one, other = (evaluate(verb, tmp_path) for _ in range(2))
    assert compare_ledgers(one, other).equal
    (record,) = evaluations(one)
    assert record["name"] == verb
    assert record["batches"] == 6
    assert list(record.get("scalars", {})) == ([] if verb == "predict" else ["val_loss"])
    assert [path.name for path in list_evaluations(tmp_path)] == [f"{verb}-000", f"{verb}-001"]
    assert list_fits(tmp_path) == []
    assert one.outcome(0).end.status == "finished"


def test_one_bit_of_one_output_is_seen_and_other_weights_are_told_from_other_arithmetic(tmp_path):
    """The weights that were evaluated are in the ledger too."""

    def predict_step(self, batch, batch_idx):
        outputs = self.layers(batch[0])
        if batch_idx == 4:
            outputs.view(torch.int32)[0, 0] ^= 1
        return outputs

    model = make_model(predict_step=predict_step)
    plain, flipped = evaluate("predict", tmp_path), evaluate("predict", tmp_path, model)
    assert not compare_ledgers(plain, flipped).equal
    one, other = evaluations(plain) + evaluations(flipped)
    assert one["outputs"] != other["outputs"]
    assert one["batches"] == other["batches"]
    with torch.no_grad():
        model.layers[0].bias[0] += 1
    changed = evaluate("predict", tmp_path, model)
    weights = [ledger.outcome(0).final.groups["weights"] for ledger in (plain, flipped, changed)]
    assert weights[0] == weights[1]
    differing = [name for name in weights[0] if weights[0][name] != weights[2][name]]
    assert differing == ["layers.0.bias"]


def test_each_validation_of_a_fit_is_in_its_ledger(fit):
    """The sanity check is not: it counts for nothing."""
    ledger = fit(trainer_num_sanity_val_steps=2)
    found = [(r["name"], r["epoch"], r["step"], r["batches"]) for r in evaluations(ledger)]
    assert found == [("validate", 0, 6, 6), ("validate", 1, 12, 6)]
    assert compare_ledgers(ledger, fit()).equal


def test_outputs_without_a_digest_are_said_and_stop_nothing(tmp_path):
    class Result:
        """Of the user's own."""

        def __reduce__(self):
            raise TypeError

    def predict(number):
        model = make_model(predict_step=lambda *_: [Result(), torch.full((2,), number)])
        return evaluations(evaluate("predict", tmp_path, model))[0]

    one, same, other = map(predict, (1.0, 1.0, 2.0))
    assert one["undigested"] == 6
    assert "Result" in one["problem"]
    # What is beside it counts.
    assert one["outputs"] == same["outputs"] != other["outputs"]


def test_a_summary_that_is_a_method_gets_no_digest():
    experiment = type("Experiment", (), {"summary": lambda self: "text"})()
    log_digest([SimpleNamespace(experiment=experiment)], "00", 0)
