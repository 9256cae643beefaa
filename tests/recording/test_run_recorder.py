"""The recorder that loops and Trainers share."""

import pickle

import torch

from lightning_d9m.control.settings import Settings
from lightning_d9m.ledger.folder import create_ledger_folder, read_ledger
from lightning_d9m.ledger.format.records import End
from lightning_d9m.recording.collective import Ranks
from lightning_d9m.recording.ledger_recorder import Policy
from lightning_d9m.recording.run_recorder import RunRecorder, describe_training


def test_a_training_is_recorded_and_the_closed_recorder_pickled(tmp_path):
    model = torch.nn.Linear(2, 1)
    run = RunRecorder(Policy())
    settings = Settings(seed=3)
    described = describe_training(Ranks(0), settings, {"world.size": 1}, model, model, fit=2)
    assert (run.is_open, run.compares, run.ledger_position, run.loss_text) == (False,) * 2 + (
        None,
        None,
    )
    run.append({"kind": "ignored while no ledger is open"})
    folder = tmp_path / "ledgers"
    run.begin(Ranks(0), model, lambda: described, lambda: create_ledger_folder(folder))
    run.load_loss((0.25).hex())
    checks = []
    digests = run.take("epoch", epoch=0, step=1, verify=lambda: checks.append("called"))
    assert (run.record(digests), checks) == (0, ["called"])
    assert list(digests.sketches) == ["weight", "bias"]
    assert not run.take("final", epoch=0, step=1).sketches
    assert run.is_open
    copied = pickle.loads(pickle.dumps(run))  # noqa: S301 - our own
    assert (copied.is_open, copied.digest, copied.folder) == (False, run.digest, run.folder)
    run.end(End(status="finished"))
    run.end(End(status="finished"))
    assert (run.is_open, run.loss) == (False, None)
    outcome = read_ledger(run.folder).outcome(0)
    assert (outcome.last.loss, outcome.last.totals["weights"]) == ((0.25).hex(), run.digest)
    assert outcome.last.sketches == digests.sketches
    assert (outcome.end.status, read_ledger(run.folder).header.seed) == ("finished", 3)
