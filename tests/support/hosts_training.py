"""One worker of torchrun, horovodrun or srun on one of several hosts; see tests/hosts.

Usage: hosts_training.py FOLDER [WORD=VALUE ...]. The words:

- ``limit``: the time limit of the process group in seconds.
- ``wait``: the epoch before which a training on N processes writes a file ``waitingN``, and waits
  for a file ``goN``.
- ``kept``: a folder of checkpoints, from the last of which it continues.
- ``logical``: the number of logical ranks under Horovod; without it, it has fixed buckets.

An error is printed.
"""

import logging
import os
import sys
import time
import warnings
from datetime import timedelta
from pathlib import Path

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from logical_trainings import fit

from lightning_d9m import DDPDeterministicStrategy, HorovodDeterministicStrategy


class Waiting(L.Callback):
    """Waits between two epochs until the test has changed the network."""

    def __init__(self, epoch):
        self.epoch = epoch

    def on_train_epoch_start(self, trainer, module):
        if trainer.current_epoch == self.epoch:
            Path(f"waiting{trainer.world_size}").touch()
            while not Path(f"go{trainer.world_size}").exists():
                time.sleep(0.01)
                if trainer.received_sigterm:  # Lightning would stop after the next batch
                    sys.exit(1)


def make_arguments(words):
    """Return the Trainer's arguments that differ between the tests."""
    if "HOROVOD_SIZE" in os.environ:
        logical = int(words["logical"]) if "logical" in words else None
        return {"strategy": HorovodDeterministicStrategy(logical_ranks=logical), "devices": 1}
    callbacks, made = [], {}
    if "limit" in words:
        limit = timedelta(seconds=int(words["limit"]))
        made["strategy"] = DDPDeterministicStrategy(logical_ranks=4, timeout=limit)
    if "wait" in words:
        callbacks.append(Waiting(int(words["wait"])))
    if "SLURM_NTASKS" in os.environ:  # Lightning saves and resumes by itself
        made |= {"devices": 1, "num_nodes": int(os.environ["SLURM_NNODES"])}
        return made | {"callbacks": callbacks, "default_root_dir": words["kept"]}
    if "kept" in words:
        callbacks.append(ModelCheckpoint(words["kept"], save_last=True, every_n_train_steps=1))
        made |= {"enable_checkpointing": True, "resumed": "last"}
    return made | {
        "callbacks": callbacks,
        "devices": int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        "num_nodes": int(os.environ.get("GROUP_WORLD_SIZE", "1")),
    }


def main():
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    words = dict(word.split("=") for word in sys.argv[2:])
    try:
        fit(Path(sys.argv[1]), "cnn", 4, **make_arguments(words))
    except BaseException as error:
        print("ended by", type(error).__name__, error, flush=True)  # noqa: T201 - the test reads it
        raise


if __name__ == "__main__":
    main()
