"""The callback from YAML and from the command line of LightningCLI, and across processes."""

import importlib
import subprocess
import sys
import textwrap

import pytest

from lightning_d9m import DeterminismCallback
from lightning_d9m.integrations.trainer import packages

YAML = """
seed_everything: 9
trainer:
  max_epochs: 1
  accelerator: cpu
  logger: false
  enable_checkpointing: false
  enable_progress_bar: false
  enable_model_summary: false
  limit_train_batches: 2
  limit_val_batches: 0
  callbacks:
    - class_path: lightning_d9m.DeterminismCallback
      init_args:
        on_drift: warn
        ledger_dir: {folder}
"""


@pytest.fixture
def command_line(tmp_path, monkeypatch):
    """Return a function that runs LightningCLI with the given words."""
    package = importlib.import_module("pytorch_lightning")
    importlib.import_module("pytorch_lightning.cli")
    demo = importlib.import_module("pytorch_lightning.demos.boring_classes").BoringModel
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py"])
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # Lightning's own use of it

    def run(*words):
        return package.cli.LightningCLI(demo, args=list(words), save_config_callback=None)

    return run


def test_from_yaml(command_line, tmp_path):
    (tmp_path / "config.yaml").write_text(YAML.format(folder=tmp_path / "ledgers"))
    cli = command_line("fit", "--config", "config.yaml")
    (callback,) = [c for c in cli.trainer.callbacks if isinstance(c, DeterminismCallback)]
    assert callback._recorder.run.options.on_drift == "warn"
    header = (tmp_path / "ledgers/fit-000/rank-0.jsonl").read_text().splitlines()[0]
    assert '"seed":9' in header


def test_a_bad_word_is_one_clear_error(command_line, capsys):
    callback = "--trainer.callbacks+=lightning_d9m.DeterminismCallback"
    with pytest.raises(SystemExit):
        command_line("fit", callback, "--trainer.callbacks.on_drift=shrug")
    error = capsys.readouterr().err
    assert "shrug" in error
    assert "raise" in error


def test_a_package_that_is_imported_after_the_callback_accepts_it(forking_python):
    """Sorted imports have ``lightning_d9m`` before ``pytorch_lightning``."""
    code = """
        import lightning.pytorch
        from lightning_d9m import DeterminismCallback
        import pytorch_lightning

        class Own(DeterminismCallback):
            pass

        assert not issubclass(Own, pytorch_lightning.Callback)
        callback = Own(seed=1)
        packages = lightning.pytorch, pytorch_lightning
        assert all(isinstance(callback, package.Callback) for package in packages)
        assert "ddp_d9m" in pytorch_lightning.strategies.StrategyRegistry
        trainer = pytorch_lightning.Trainer(callbacks=callback, logger=False, barebones=False)
        assert callback in trainer.callbacks
    """
    subprocess.run([forking_python, "-c", textwrap.dedent(code)], check=True)


def test_without_lightning_the_error_says_what_to_install(monkeypatch):
    for name in packages.PACKAGES:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(packages, "find_spec", lambda _: None)
    with pytest.raises(ImportError, match="pip install lightning"):
        packages.import_packages()
