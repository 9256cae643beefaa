"""Fixtures of the adapters' tests: fits as runs of their own would do them."""

import gc
import importlib
from collections.abc import Iterator

import pytest

# Fixtures import what they need: pytest may load this file before `pytest_configure` of the outer
# one, which loads both packages of Lightning before the callback takes its bases from them.


@pytest.fixture(autouse=True)
def process_as_new(unseeded, new_process) -> Iterator[None]:
    """Begin without seeds or fits; collect forgotten callbacks within the test that forgot them."""
    yield
    gc.collect()


@pytest.fixture
def fit(tmp_path, new_process):
    """Return a function that trains as a run of its own would, and returns its ledger."""
    from trainings import QUIET, make_loader, make_model

    from lightning_d9m import DeterminismCallback
    from lightning_d9m.engine.ledger.folder import read_ledger

    def train(
        *, package="lightning.pytorch", loader=None, model=None, again=False, validate=True, **words
    ):
        trainer_words = {k[8:]: words.pop(k) for k in list(words) if k.startswith("trainer_")}
        if not again:
            new_process()
        before = set(tmp_path.glob("**/fit-*"))
        callback = DeterminismCallback(**({"seed": 3, "ledger_dir": tmp_path} | words))
        callbacks = [callback, *trainer_words.pop("callbacks", [])]
        trainer = importlib.import_module(package).Trainer(
            **({"max_epochs": 2, "default_root_dir": tmp_path} | QUIET | trainer_words),
            callbacks=callbacks,
        )
        train.trainer, train.callback = trainer, callback
        model = make_model(package) if model is None else model
        validation = [make_loader(shuffle=False)] if validate else []
        trainer.fit(model, make_loader() if loader is None else loader, *validation)
        (folder,) = set(tmp_path.glob("**/fit-*")) - before
        return read_ledger(folder)

    return train


@pytest.fixture
def fits(tmp_path, new_process):
    from resuming import Fits

    return Fits(tmp_path, new_process)
