"""Break one rank in each of several trainings; the other ranks must raise, too, with the cause.

Usage: faults.py FOLDER FAULT... (killed ends the process, and comes last)
"""

import os
import signal
import sys
import traceback
import warnings
from pathlib import Path

import models
import pytorch_lightning as pl
import torch
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset
from trainings import QUIET

from lightning_d9m import DeterminismCallback, HorovodDeterministicStrategy

warnings.filterwarnings("ignore")
folder, *faults = sys.argv[1:]
rank = int(os.environ["HOROVOD_RANK"])


class Model(pl.LightningModule):
    """Rank 1 fails in its third batch."""

    def __init__(self, fault):
        super().__init__()
        self.fault = fault
        self.net = models.network()

    def training_step(self, batch, index):
        wrong = self.global_rank == 1 and index == 2
        if wrong and self.fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if wrong and self.fault == "raising":
            raise ValueError("the third batch is bad")
        return functional.mse_loss(self.net(batch[0]), batch[1])

    def on_train_batch_end(self, outputs, batch, index):
        if self.global_rank == 1 and index == 7 and self.fault == "ulp":
            weight = self.net[0].weight.data
            weight[3, 2] = torch.nextafter(weight[3, 2], torch.tensor(9.0))

    def validation_step(self, batch, index):
        if self.global_rank == 1 and self.fault == "validation":
            self.all_gather(torch.zeros(2))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Stream(IterableDataset):
    """A dataset of unknown length, which is shorter on rank 1."""

    def __iter__(self):
        yield from list(models.loader(64).dataset)[: 48 if rank == 1 else 64]


def train(fault):
    """Train with a fault on rank 1."""
    options = {"bucket_bytes": 1024} if rank == 1 and fault == "settings" else {}
    samples = 48 if rank == 1 and fault == "batches" else 64
    trainer = pl.Trainer(
        strategy=HorovodDeterministicStrategy(**options),
        max_epochs=1,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        callbacks=[DeterminismCallback(ledger_dir=Path(folder, fault, "d9m"))],
        **QUIET,
    )
    loader = DataLoader(Stream(), batch_size=8) if fault == "stream" else models.loader(samples)
    trainer.fit(Model(fault), loader, models.loader(16))


Path(folder, f"pid-{rank}").write_text(str(os.getpid()))
for fault in faults:
    Path(folder, fault).mkdir(exist_ok=True)
    try:
        train(fault)
    except Exception as error:
        text = f"{type(error).__name__}: {error}\n\n{traceback.format_exc()}"
        Path(folder, fault, f"error-{rank}").write_text(text)
        if fault == faults[-1]:
            raise
