"""One rank of a training that `kill -9` ends, and of the resumed training.

Usage: resume.py FOLDER straight|killed|resumed...
"""

import os
import signal
import sys
import warnings
from pathlib import Path

import lightning.pytorch as pl
import models
import torch
from torch.nn import functional

from lightning_d9m.control import session
from lightning_d9m.lightning.callback import DeterminismCallback

folder, *runs = sys.argv[1:]
checkpoint = Path(folder, "middle.ckpt")
warnings.filterwarnings("ignore")


class Model(pl.LightningModule):
    """Draws random numbers in every step, so that a resume must restore their state."""

    def __init__(self):
        super().__init__()
        self.net = models.network()

    def training_step(self, batch, _):
        inputs, targets = batch
        return functional.mse_loss(self.net(inputs + 0.1 * torch.randn_like(inputs)), targets)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class KillRank(pl.Callback):
    """Saves a checkpoint in the middle of an epoch, and kills rank 1 one batch later."""

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.current_epoch == 1 and batch_idx == 0:
            trainer.save_checkpoint(checkpoint)
        if trainer.current_epoch == 1 and batch_idx == 1 and trainer.global_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)


for run in runs:
    session._fits = 0  # as if each run had its own process
    torch.manual_seed(1)
    callbacks = [DeterminismCallback(seed=3, ledger_dir=Path(folder, run))]
    trainer = pl.Trainer(
        accelerator="cpu",
        strategy="horovod_d9m",
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[*callbacks, *([KillRank()] if run == "killed" else [])],
    )
    ckpt_path = checkpoint if run == "resumed" else None
    trainer.fit(Model(), models.loader(64), ckpt_path=ckpt_path)
