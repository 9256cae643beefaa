"""Trainings with logical ranks, on the ranks of horovodrun or without; see test_logical_ranks.py.

Usage: logical.py FOLDER
"""

import json
import logging
import os
import sys
import warnings
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[2] / "support"))  # the trainings of all tests

import logical_trainings
import models
import torch

from lightning_d9m import DDPDeterministicStrategy, HorovodDeterministicStrategy, SettingError

STRATEGY = (
    HorovodDeterministicStrategy if "HOROVOD_SIZE" in os.environ else DDPDeterministicStrategy
)


def fit(folder, net, logical_ranks=4):
    """Train, and return the digest of the model and the logged values."""
    words = {"accumulate_grad_batches": 2, "several": True} if net == "branches" else {}
    words["strategy"] = STRATEGY(logical_ranks=logical_ranks)
    trainer = logical_trainings.fit(folder / net, net, 4, **words)
    return {
        "digest": models.digest(trainer.lightning_module),
        "metrics": {name: float(value).hex() for name, value in trainer.callback_metrics.items()},
        "steps": trainer.global_step,
    }


def error_of(folder, **options):
    """Return the message of the error that a training raises on every rank."""
    try:
        fit(folder / "refused", "mlp", **options)
    except SettingError as error:
        return str(error)
    raise AssertionError("no error was raised")


def find_refusals(folder):
    """Return the errors of a collective of Horovod in a step, and of too many processes."""
    import horovod.torch

    class Reducing(logical_trainings.Classifier):
        def training_step(self, batch, batch_idx):
            horovod.torch.allreduce(torch.ones(1))
            return super().training_step(batch, batch_idx)

    with mock.patch.object(logical_trainings, "Classifier", Reducing):
        collective = error_of(folder)
    horovod.torch.allreduce(torch.ones(1))  # which can be called again
    return {"collective": collective, "too many": error_of(folder, logical_ranks=2)}


def main():
    """Train several networks."""
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    folder = Path(sys.argv[1])
    folder.mkdir(exist_ok=True)
    logical_trainings.PROCESSES = 1  # Horovod's launcher has started one device on each rank
    found = {net: fit(folder, net) for net in ("cnn", "branches")}
    if STRATEGY is HorovodDeterministicStrategy:
        found |= find_refusals(folder)
    rank = os.environ.get("HOROVOD_RANK", "0")
    (folder / f"rank-{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
