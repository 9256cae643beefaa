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
import logical_resuming
import logical_trainings
import models
import torch

from lightning_d9m import (
    DDPDeterministicStrategy,
    HorovodDeterministicStrategy,
    RankLostError,
    SettingError,
)

RANKS = 4
SIZE = int(os.environ["HOROVOD_SIZE"])


def fit(folder, net, logical_ranks=RANKS, make=HorovodDeterministicStrategy, **options):
    """Train, and return the digest of the model and the logged values."""
    strategy = make(logical_ranks=logical_ranks, **options)
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


def save_or_resume(folder):
    """Save checkpoints on one process; resume on others. Return the digest at the end."""
    if SIZE == 1:
        words = {"callbacks": [logical_resuming.Saving(folder)]}
    else:
        words = {"resumed": folder / "batch0-1.ckpt"}
    strategy = HorovodDeterministicStrategy(logical_ranks=RANKS)
    ledgers = folder / f"resumed-{SIZE}"
    trainer = logical_trainings.fit(ledgers, "mlp", RANKS, strategy=strategy, **words)
    return models.digest(trainer.lightning_module)


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


class Failing(logical_trainings.Classifier):
    """Fails on the last rank."""

    def training_step(self, batch, batch_idx):
        if batch_idx == 1 and self.global_rank == SIZE - 1:
            raise ValueError("this rank fails")
        return super().training_step(batch, batch_idx)


def error_of_one_rank(folder):
    """Return the message of the error of a training that one rank fails; it may train again."""
    with mock.patch.object(logical_trainings, "Classifier", Failing):
        try:
            fit(folder / "failed", "mlp")
        except (ValueError, RankLostError) as error:
            return str(error)
    raise AssertionError("no error was raised")


def main():
    """Train several networks."""
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    folder = Path(sys.argv[1])
    ledgers = folder / f"horovod-{SIZE}"
    logical_trainings.PROCESSES = 1  # Horovod's launcher has started one device on each rank
    failed = error_of_one_rank(ledgers)
    found = {net: fit(ledgers, net) for net in ("mlp", "cnn", "branches")}
    found["small buckets"] = fit(ledgers / "small", "mlp", bucket_bytes=256)
    if SIZE == 1:
        found["ddp"] = fit(ledgers / "ddp", "mlp", make=DDPDeterministicStrategy)
    found["resumed"] = save_or_resume(folder)
    found["failed"] = failed
    found["collective"] = error_of_collective(ledgers)
    if SIZE > 2:
        found["too many"] = error_of(ledgers, logical_ranks=2)
    rank = int(os.environ["HOROVOD_RANK"])
    (folder / f"rank-{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
