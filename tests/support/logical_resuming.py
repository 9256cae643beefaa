"""One rank of a training with logical ranks that is saved, killed or resumed.

Usage: logical_resuming.py FOLDER WHAT..., each of WHAT "straight", "killed" (the last rank, by the
system in the second epoch) or the name of a checkpoint in FOLDER to resume from.
"""

import os
import signal
import sys
import warnings
from pathlib import Path

import lightning as L
from logical_trainings import PROCESSES, fit

RANKS = 4


class Saving(L.Callback):
    """Saves checkpoints between two epochs, within one, and at the end of one."""

    def __init__(self, folder):
        self.folder = folder

    def save(self, trainer, name):
        trainer.save_checkpoint(self.folder / f"{name}-{PROCESSES}.ckpt")

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.current_epoch == 1:
            self.save(trainer, f"batch{batch_idx}")

    def on_train_epoch_end(self, trainer, module):
        if trainer.current_epoch == 0:
            self.save(trainer, "epoch")


class Killing(L.Callback):
    """Kills the last rank in the second epoch."""

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        last = trainer.global_rank == trainer.world_size - 1
        if trainer.current_epoch == 1 and batch_idx == 2 and last:
            os.kill(os.getpid(), signal.SIGKILL)


def main():
    """Train in each of the ways."""
    folder, *whats = sys.argv[1:]
    folder = Path(folder)
    warnings.filterwarnings("ignore")
    for what in whats:
        words = {"max_epochs": 3, "accumulate_grad_batches": 2}
        if what in ("straight", "killed"):
            words["callbacks"] = [Saving(folder), *[Killing()] * (what == "killed")]
        else:
            words["resumed"] = folder / f"{what}.ckpt"
        fit(folder / what, "cnn", RANKS, **words)


if __name__ == "__main__":
    main()
