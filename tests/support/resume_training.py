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
from trainings import QUIET, make_exception_saver, make_loader, make_model

from lightning_d9m import DeterminismCallback
from lightning_d9m.engine.control import session

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
    session.restart_fits()
    what, _, workers = what.partition("+")
    workers = {"num_workers": 2, "persistent_workers": True} if workers else {}
    callbacks = [DeterminismCallback(seed=5, ledger_dir=Path(folder, what))]
    words = dict(QUIET)
    if what not in {"straight", "resumed"}:
        callbacks.append(Ending(what))
    if what == "terminated":
        callbacks.append(make_exception_saver(folder, checkpoint.stem))
        words["enable_checkpointing"] = True
    trainer = L.Trainer(
        **words,
        max_epochs=2,
        strategy=strategy,
        devices=world if strategy == "ddp" else 1,
        accumulate_grad_batches=2,
        callbacks=callbacks,
        default_root_dir=folder,
    )
    size = 96 * world
    trainer.fit(
        make_model(),
        make_loader(size=size, **workers),
        make_loader(size=size, shuffle=False),
        ckpt_path=checkpoint if what == "resumed" else None,
    )
    return trainer


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
