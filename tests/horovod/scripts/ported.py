"""Train with Horovod's own optimizer in Lightning, like projects ported from Lightning 1.9.

It uses no buckets. Which gradients Horovod fuses depends on time; here every second run fuses none.

Usage: ported.py
"""

import os
import warnings
from contextlib import ExitStack
from unittest import mock

import horovod.torch as hvd
import lightning.pytorch as pl
import models
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch.nn import functional
from torch.utils.data import DataLoader

from lightning_d9m.horovod.strategy import HorovodDeterministicStrategy


class PortedStrategy(HorovodDeterministicStrategy):
    """Reduces gradients as Lightning 1.9 did: by Horovod's optimizer, with its fusion."""

    def setup_environment(self):
        number = int(os.environ["LIGHTNING_D9M_LEDGER_DIR"].rpartition("-")[2])
        with mock.patch.dict(os.environ, HOROVOD_FUSION_THRESHOLD=str(number % 2 * 2**26)):
            hvd.init()
        self.cluster_environment.update(hvd)
        DDPStrategy.setup_environment(self)

    def setup(self, trainer):
        DDPStrategy.setup(self, trainer)
        named = list(self.lightning_module.named_parameters())
        self.optimizers = [hvd.DistributedOptimizer(own, named) for own in self.optimizers]
        self._synchronized = ExitStack()
        for optimizer in self.optimizers:
            self._synchronized.enter_context(optimizer.skip_synchronize())

    backward = DDPStrategy.backward
    optimizer_step = DDPStrategy.optimizer_step

    def post_backward(self, closure_loss):
        for optimizer in self.optimizers:
            optimizer.synchronize()


class Deep(pl.LightningModule):
    """A hundred small parameters, for which fusion is designed."""

    def __init__(self):
        super().__init__()
        self.layers = models.many_small_layers()
        models.jitter(self)

    def training_step(self, batch, _):
        return functional.mse_loss(self.layers(batch), batch.roll(1, 1))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


warnings.filterwarnings("ignore")
torch.set_num_threads(1)
samples = torch.randn(96, 24, generator=torch.Generator().manual_seed(7))
trainer = pl.Trainer(
    max_epochs=1,
    accelerator="cpu",
    devices=1,
    strategy=PortedStrategy(),
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Deep(), DataLoader(samples, batch_size=8))
