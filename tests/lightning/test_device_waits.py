"""Nothing in a batch waits for a device: more batches do not mean more waits."""

from types import FunctionType

import lightning.pytorch as lightning
import pytest
import torch
from simulated_device import Waits, put, simulate
from trainings import QUIET, make_loader, make_model

from lightning_d9m import DeterminismCallback, Recorder, deterministic
from lightning_d9m.engine.hashing.digest import digest_value
from lightning_d9m.integrations.lightning.trainer_recorder import TrainerRecorder

BATCHES = (4, 8)


@pytest.fixture(autouse=True)
def simulated(monkeypatch):
    return simulate(monkeypatch)


def evaluating_step(self, batch, batch_idx):
    """Return outputs on the device."""
    return {"outputs": put(self.layers(batch[0]).detach()), "number": batch_idx}


def run_trainer(verb, batches, folder):
    model = make_model(validation_step=evaluating_step, predict_step=evaluating_step)
    model.test_step = model.validation_step
    callback = DeterminismCallback(seed=3, ledger_dir=folder)
    settings = QUIET | {"max_epochs": 1, "num_sanity_val_steps": 0}
    trainer = lightning.Trainer(callbacks=[callback], **settings)
    loaders = [make_loader(shuffle=False, size=16 * batches)]
    if verb == "fit":
        loaders *= 2
    getattr(trainer, verb)(model, *loaders)


def run_loop(_, batches, folder):
    with deterministic(seed=3, threads=1):
        model = torch.nn.Linear(64, 10)
        optimizer = torch.optim.Adam(model.parameters())
        with Recorder(folder, model, optimizer) as run:
            for images, classes in run.batches(make_loader(size=16 * batches)):
                loss = torch.nn.functional.cross_entropy(model(images), classes)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                run.step(loss=put(loss.detach()))
            run.epoch()


def count(run, verb, folder):
    """Return the waits that more batches add."""
    found = []
    for batches in BATCHES:
        with Waits() as waits:
            run(verb, batches, folder)
        found.append(waits.found)
    more = found[1] - found[0]
    # The stand-in of a device keeps tensors in a list, which counts as state of the program.
    return {name: more[name] for name in more if "/engine/state/" not in name}


RUNS = [(run_trainer, verb) for verb in ("fit", "validate", "test", "predict")] + [
    (run_loop, "loop")
]


@pytest.mark.parametrize(("run", "verb"), RUNS, ids=[verb for _, verb in RUNS])
def test_a_batch_waits_for_no_device(run, verb, tmp_path):
    assert not count(run, verb, tmp_path)


PLANTED = {
    "item": lambda there: there.sum().item(),
    "copy": lambda there: there.to("cpu"),
    "digest": digest_value,
    "event": lambda _: torch.cuda.current_stream(0).record_event().synchronize(),
}


@pytest.mark.parametrize("wait", PLANTED.values(), ids=PLANTED)
def test_a_wait_that_is_planted_in_a_batch_is_counted(wait, tmp_path, monkeypatch):
    """In a function of the package that runs in each batch of a validation."""
    keep = TrainerRecorder.end_evaluation_batch
    code = wait.__code__.replace(co_filename=keep.__code__.co_filename)
    planted = FunctionType(code, wait.__globals__)

    def keep_and_wait(self, outputs, *words):
        planted(outputs["outputs"])
        keep(self, outputs, *words)

    monkeypatch.setattr(TrainerRecorder, "end_evaluation_batch", keep_and_wait)
    added = count(run_trainer, "validate", tmp_path)
    assert max(added.values(), default=0) == BATCHES[1] - BATCHES[0]
