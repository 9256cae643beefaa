"""One process of a training that is interrupted and resumed.

Usage: resume_training.py FOLDER STRATEGY WHAT..., each of WHAT "straight", "killed" (by the system,
some batches after a checkpoint between two micro-batches), "late" (so, after one in the last batch
of an epoch, before a validation), "terminated" (by SIGTERM) or "resumed"; with "+workers" after it,
two workers that live for the whole run load the batches.
"""

import os
import signal
import sys
import warnings
from pathlib import Path

import lightning as L
import torch
import trainings

folder, strategy, *whats = sys.argv[1:]
checkpoint = Path(folder, "interrupted.ckpt")
world = int(os.environ.get("WORLD_SIZE") or os.environ.get("HOROVOD_SIZE") or 1)


class Ending(L.Callback):
    """Saves a checkpoint in the middle of an epoch, and ends the run in some way."""

    def __init__(self, how):
        self.how = how

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        place = trainer.current_epoch, batch_idx
        if self.how == "terminated" and place == (1, 2):
            os.kill(os.getpid(), signal.SIGTERM)
        elif place == ((0, 5) if self.how == "late" else (1, 2)):
            trainer.save_checkpoint(checkpoint)
        elif place == (1, 4):
            os.kill(os.getpid(), signal.SIGKILL)


def fit(what):
    """Train as a run of its own would."""
    what, _, workers = what.partition("+")
    workers = {"num_workers": 2, "persistent_workers": True} if workers else {}
    callbacks = [] if what in {"straight", "resumed"} else [Ending(what)]
    if what == "terminated":
        callbacks.append(trainings.make_exception_saver(folder, checkpoint.stem))
    size = 96 * world
    return trainings.fit(
        trainings.make_model(),
        trainings.make_loader(size=size, **workers),
        trainings.make_loader(size=size, shuffle=False),
        resumed=checkpoint if what == "resumed" else None,
        folder=Path(folder, what),
        callbacks=callbacks,
        enable_checkpointing=what == "terminated",
        max_epochs=2,
        num_sanity_val_steps=2,
        strategy=strategy,
        devices=world if strategy == "ddp" else 1,
        accumulate_grad_batches=2,
        default_root_dir=folder,
    )


def main():
    """Train in turn."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # tests in the background may have it ignored
    for what in whats:
        trainer = fit(what)
    if trainer.is_global_zero:
        # A script that saves on one rank at its end: whatever is ours waits for nobody.
        saved = trainer._checkpoint_connector.dump_checkpoint()
        assert len(saved["callbacks"]["lightning_d9m"]["ranks"]) == world


if __name__ == "__main__":
    main()
