"""One worker of torchrun on one of several hosts; see tests/hosts.

Usage: torchrun ... hosts_training.py FOLDER [SECONDS]. With a number of seconds, which is the time
limit of the process group, it writes a file ``waiting`` after the first epoch and waits for a file
``go``; its error is printed.
"""

import logging
import os
import sys
import time
import warnings
from datetime import timedelta
from pathlib import Path

import lightning as L
from logical_trainings import fit

from lightning_d9m import DDPDeterministicStrategy


class Waiting(L.Callback):
    """Waits between two epochs until the test has changed the network."""

    def on_train_epoch_start(self, trainer, module):
        if trainer.current_epoch == 1:
            Path("waiting").touch()
            while not Path("go").exists():
                time.sleep(0.01)


def main():
    """Train with four logical ranks, and write the ledger below the folder."""
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    words = {}
    if len(sys.argv) > 2:
        limit = timedelta(seconds=int(sys.argv[2]))
        strategy = DDPDeterministicStrategy(logical_ranks=4, timeout=limit)
        words = {"strategy": strategy, "callbacks": [Waiting()]}
    try:
        fit(
            Path(sys.argv[1]),
            "cnn",
            4,
            devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
            num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", "1")),
            **words,
        )
    except BaseException as error:
        print("ended by", type(error).__name__, error, flush=True)  # noqa: T201 - the test reads it
        raise


if __name__ == "__main__":
    main()
