"""Train the scenarios of the command line and write the result of each rank.

Usage: train.py STRATEGY FOLDER SCENARIO...
"""

import json
import os
import random
import sys
import time
import warnings
from pathlib import Path

import lightning.pytorch as pl
import models
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.nn import functional
from trainings import QUIET

from lightning_d9m import (
    DDPDeterministicStrategy,
    DeterminismCallback,
    HorovodDeterministicStrategy,
)
from lightning_d9m.engine.hashing.digest import digest_value

strategy, folder, *scenarios = sys.argv[1:]
warnings.filterwarnings("ignore")
chance = random.SystemRandom()


def delay(gradient):
    """Delay gradients by unseeded times, so that the order in which ranks are ready varies."""
    if chance.random() < 0.1:
        time.sleep(chance.random() * 0.003)
    return gradient


class Automatic(pl.LightningModule):
    """Automatic optimization with a scheduler."""

    def __init__(self):
        super().__init__()
        self.net = models.network()
        for parameter in self.net.parameters():
            parameter.register_hook(delay)

    def training_step(self, batch, index):
        inputs, targets = batch
        loss = functional.mse_loss(self.compute(inputs, index), targets)
        self.log("train_loss", loss, sync_dist=True, on_epoch=True)
        return loss

    def compute(self, inputs, _):
        return self.net(inputs)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)]


class Branches(Automatic):
    """Each rank leaves another layer out in some batches, and both leave one out always."""

    def __init__(self):
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(1, 1) for _ in range(3))

    def compute(self, inputs, index):
        return self.branches[(index + self.global_rank) % 2](self.net(inputs))


class Manual(Automatic):
    """Two optimizers that alternate; toggle_optimizer freezes the other one's parameters."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.second = nn.Linear(1, 1)

    def training_step(self, batch, _):
        inputs, targets = batch
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            loss = functional.mse_loss(self.second(self.net(inputs)), targets)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self):
        return (
            torch.optim.SGD(self.net.parameters(), lr=0.02),
            torch.optim.Adam(self.second.parameters(), lr=0.02),
        )


SCENARIOS = {
    "plain": (Automatic, {}),
    "accumulation": (Automatic, {"accumulate_grad_batches": 3}),
    "clip_norm": (Automatic, {"gradient_clip_val": 0.5}),
    "clip_value": (Automatic, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    "bf16": (Automatic, {"precision": "bf16-mixed"}),
    "branches": (Branches, {}),
    "manual": (Manual, {}),
    "logical": (Automatic, {"accumulate_grad_batches": 2}),
}


def make_strategy(scenario):
    """Return a new strategy; torch's own needs to know that parameters may be unused."""
    if strategy == "ddp":
        return DDPStrategy(find_unused_parameters=True)
    kind = HorovodDeterministicStrategy if strategy == "horovod_d9m" else DDPDeterministicStrategy
    return kind(logical_ranks=4 if scenario == "logical" else None)


torch.set_num_threads(1)
result = {}
environment = dict(os.environ)
for scenario in scenarios:
    make, options = SCENARIOS[scenario]
    pl.seed_everything(3, verbose=False)
    os.environ.update(environment)  # Lightning's environment removes WORLD_SIZE at the end
    model = make()
    logical = scenario == "logical"
    trainer = pl.Trainer(
        max_epochs=2,
        devices=2 if strategy == "ddp" else 1,
        strategy=make_strategy(scenario),
        callbacks=[DeterminismCallback(seed=5, ledger_dir=folder)] if logical else [],
        **QUIET | options,
    )
    trainer.fit(model, models.loader(batch_size=4 if logical else 8))
    digest = digest_value(model.state_dict())
    result[scenario] = {"digest": digest, "steps": trainer.global_step}
Path(folder, f"rank-{trainer.global_rank}.json").write_text(json.dumps(result))
if torch.distributed.is_initialized():  # Gloo's threads must not outlive the interpreter
    torch.distributed.destroy_process_group()
