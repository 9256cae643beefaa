"""Break one rank while it trains; the others have to end, too, and say why.

Usage: faults.py FOLDER killed|raising|gradients|batches|stream|settings|validation|ulp TRANSPORT
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
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset

from lightning_d9m.horovod.strategy import HorovodDeterministicStrategy
from lightning_d9m.lightning.callback import DeterminismCallback

warnings.filterwarnings("ignore")
folder, fault, transport = Path(sys.argv[1]), sys.argv[2], sys.argv[3]


class Model(pl.LightningModule):
    """Rank 1 goes wrong in its third batch."""

    def __init__(self):
        super().__init__()
        self.net = models.network()
        self.branch = nn.Linear(1, 1)

    def training_step(self, batch, index):
        wrong = self.global_rank == 1 and index == 2
        if wrong and fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if wrong and fault == "raising":
            raise ValueError("the third batch is bad")
        out = self.net(batch[0])
        if not (wrong and fault == "gradients"):
            out = self.branch(out)
        return functional.mse_loss(out, batch[1])

    def on_train_batch_end(self, outputs, batch, index):
        if self.global_rank == 1 and index == 7 and fault == "ulp":
            weight = self.net[0].weight.data
            weight[3, 2] = torch.nextafter(weight[3, 2], torch.tensor(9.0))

    def validation_step(self, batch, index):
        if self.global_rank == 1 and fault == "validation":
            self.all_gather(torch.zeros(2))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Stream(IterableDataset):
    """A dataset that does not tell its length; rank 1's is shorter."""

    def __iter__(self):
        yield from list(models.loader(64).dataset)[: 48 if rank == 1 else 64]


rank = int(os.environ["HOROVOD_RANK"])
options = {"bucket_bytes": 1024} if rank == 1 and fault == "settings" else {}
samples = 48 if rank == 1 and fault == "batches" else 64
trainer = pl.Trainer(
    accelerator="cpu",
    strategy=HorovodDeterministicStrategy(transport=transport, **options),
    max_epochs=1,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    num_sanity_val_steps=0,
    use_distributed_sampler=False,
    callbacks=[DeterminismCallback(ledger_dir=folder / "d9m")],
)
(folder / f"pid-{rank}").write_text(str(os.getpid()))
loader = DataLoader(Stream(), batch_size=8) if fault == "stream" else models.loader(samples)
try:
    trainer.fit(Model(), loader, models.loader(16))
except Exception as error:
    text = f"{type(error).__name__}: {error}\n\n{traceback.format_exc()}"
    (folder / f"error-{rank}").write_text(text)
    raise
