"""Train with Horovod's own optimizer in Lightning, like projects ported from Lightning 1.9.

It uses no buckets. Which gradients Horovod fuses depends on time; here every second run fuses none.
``d9m locate`` looks for the cause.

Usage: ported.py FOLDER
"""

import json
import sys
import warnings
from contextlib import ExitStack
from pathlib import Path

import horovod.torch as hvd
import lightning.pytorch as pl
import models  # noqa: F401 - it adds the folder of what all tests share
import torch
from lightning.pytorch.strategies import DDPStrategy
from located_runs import locate
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader
from trainings import QUIET

from lightning_d9m import DeterminismCallback, HorovodDeterministicStrategy
from lightning_d9m.engine.control import session

SAMPLES = torch.randn(24, 24, generator=torch.Generator().manual_seed(7))


class PortedStrategy(HorovodDeterministicStrategy):
    """Reduces gradients as Lightning 1.9 did: by Horovod's optimizer, with its fusion."""

    fuses = True

    def setup_environment(self):
        self.cluster_environment.update(hvd)
        DDPStrategy.setup_environment(self)

    def setup(self, trainer):
        DDPStrategy.setup(self, trainer)
        named = list(self.lightning_module.named_parameters())
        if self.fuses:
            self.optimizers = [hvd.DistributedOptimizer(own, named) for own in self.optimizers]
            self._synchronized = ExitStack()
            for optimizer in self.optimizers:
                self._synchronized.enter_context(optimizer.skip_synchronize())

    backward = DDPStrategy.backward
    optimizer_step = DDPStrategy.optimizer_step

    def post_backward(self, closure_loss):
        if self.fuses:
            for optimizer in self.optimizers:
                optimizer.synchronize()
        else:
            for name, parameter in self.lightning_module.named_parameters():
                hvd.allreduce_(parameter.grad, name=name)


class Deep(pl.LightningModule):
    """Small parameters, for which fusion is designed."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(7)
        self.layers = nn.Sequential(*(nn.Linear(24, 24) for _ in range(8)))

    def training_step(self, batch, _):
        return functional.mse_loss(self.layers(batch), batch.roll(1, 1))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def train(number):
    """Train as a run of its own would."""
    session.restart_fits()
    strategy = PortedStrategy()
    strategy.fuses = number % 2 == 1
    words = {"strategy": strategy, "devices": 1, "callbacks": [DeterminismCallback(seed=5)]}
    pl.Trainer(max_epochs=1, **words, **QUIET).fit(Deep(), DataLoader(SAMPLES, batch_size=4))


warnings.filterwarnings("ignore")
torch.set_num_threads(1)
hvd.init()
folder = Path(sys.argv[1])
found = locate(train, folder / "runs", rank=hvd.rank(), ranks=hvd.size())
(folder / f"rank-{hvd.rank()}.json").write_text(json.dumps(found))
