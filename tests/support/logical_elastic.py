"""One worker of torchrun's agents, of which one is killed; see test_resume.py of logical ranks.

Usage: torchrun ... logical_elastic.py FOLDER. A worker whose agent has ELASTIC_KILLED=1 in its
environment kills that agent and itself in the second epoch.
"""

import logging
import os
import signal
import sys
import warnings
from pathlib import Path

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from logical_trainings import fit


class Killing(L.Callback):
    """Kills the agent of this worker, and the worker, as a machine that is switched off."""

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if trainer.current_epoch == 1 and batch_idx == 2:
            os.kill(int(os.environ["AGENT_PID"]), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)


def main():
    """Train until the end, from the last checkpoint if there is one."""
    folder = Path(sys.argv[1])
    count = int(os.environ["GROUP_WORLD_SIZE"])
    if count == 1 and not (folder / "kept" / "last.ckpt").exists():
        signal.pause()  # until the other agent comes, and this worker is restarted
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    callbacks = [ModelCheckpoint(folder / "kept", save_last=True, every_n_train_steps=1)]
    if os.environ.get("ELASTIC_KILLED"):
        callbacks.append(Killing())
    fit(
        folder,
        "cnn",
        4,
        max_epochs=3,
        accumulate_grad_batches=2,
        callbacks=callbacks,
        enable_checkpointing=True,
        resumed="last",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=count,
    )


if __name__ == "__main__":
    main()
