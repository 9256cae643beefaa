"""Trainings with logical ranks on the ranks of horovodrun; see test_logical_ranks.py.

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

import horovod.torch
import logical_trainings
import models
import torch

from lightning_d9m import (
    DDPDeterministicStrategy,
    HorovodDeterministicStrategy,
    SettingError,
)

RANKS = 4
SIZE = int(os.environ["HOROVOD_SIZE"])


def fit(folder, net, logical_ranks=RANKS, make=HorovodDeterministicStrategy):
    """Train, and return the digest of the model and the logged values."""
    strategy = make(logical_ranks=logical_ranks)
    words = {"accumulate_grad_batches": 2, "several": True} if net == "branches" else {}
    trainer = logical_trainings.fit(folder / net, net, RANKS, strategy=strategy, **words)
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


class Reducing(logical_trainings.Classifier):
    """Calls a collective of Horovod in its step."""

    def training_step(self, batch, batch_idx):
        horovod.torch.allreduce(torch.ones(1))
        return super().training_step(batch, batch_idx)


def error_of_collective(folder):
    """Return the message of the error of a collective in a step; afterwards it can be called."""
    with mock.patch.object(logical_trainings, "Classifier", Reducing):
        message = error_of(folder)
    horovod.torch.allreduce(torch.ones(1))
    return message


def main():
    """Train several networks."""
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    folder = Path(sys.argv[1])
    ledgers = folder / f"horovod-{SIZE}"
    logical_trainings.PROCESSES = 1  # Horovod's launcher has started one device on each rank
    found = {net: fit(ledgers, net) for net in ("cnn", "branches")}
    if SIZE == 1:
        found["ddp"] = fit(ledgers / "ddp", "cnn", make=DDPDeterministicStrategy)
    found["collective"] = error_of_collective(ledgers)
    if SIZE > 2:
        found["too many"] = error_of(ledgers, logical_ranks=2)
    rank = int(os.environ["HOROVOD_RANK"])
    (folder / f"rank-{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
