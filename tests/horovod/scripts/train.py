"""Train the scenarios of the command line and write the result of each rank.

Usage: train.py STRATEGY FOLDER SCENARIO...
"""

import json
import os
import sys
import warnings
from pathlib import Path

import lightning.pytorch as pl
import models
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.nn import functional

import lightning_d9m.lightning.callback  # noqa: F401 - registers the strategy

strategy, folder, *scenarios = sys.argv[1:]
warnings.filterwarnings("ignore")


class Automatic(pl.LightningModule):
    """Automatic optimization with a scheduler."""

    def __init__(self):
        super().__init__()
        self.net = models.network()
        models.jitter(self)

    def training_step(self, batch, _):
        inputs, targets = batch
        loss = functional.mse_loss(self.net(inputs), targets)
        self.log("train_loss", loss, sync_dist=True, on_epoch=True)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)]


class Branches(Automatic):
    """Each rank leaves another layer out in some batches, and both leave one out always."""

    def __init__(self):
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(1, 1) for _ in range(3))

    def training_step(self, batch, index):
        inputs, targets = batch
        branch = self.branches[(index + self.global_rank) % 2]
        return functional.mse_loss(branch(self.net(inputs)), targets)


class Manual(pl.LightningModule):
    """Two optimizers that alternate; toggle_optimizer freezes the other one's parameters."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.first = models.network()
        self.second = nn.Linear(1, 1)
        models.jitter(self)

    def training_step(self, batch, _):
        inputs, targets = batch
        first, second = self.optimizers()
        for optimizer in (first, second):
            self.toggle_optimizer(optimizer)
            loss = functional.mse_loss(self.second(self.first(inputs)), targets)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self):
        return (
            torch.optim.SGD(self.first.parameters(), lr=0.02),
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
}
torch.set_num_threads(1)
result = {}
environment = dict(os.environ)
for scenario in scenarios:
    make, options = SCENARIOS[scenario]
    pl.seed_everything(3, verbose=False)
    os.environ.update(environment)  # Lightning's environment removes WORLD_SIZE at the end
    model = make()
    trainer = pl.Trainer(
        max_epochs=2,
        accelerator="cpu",
        devices=2 if strategy == "ddp" else 1,
        # Torch's own needs to know that parameters may be unused.
        strategy=DDPStrategy(find_unused_parameters=True) if strategy == "ddp" else strategy,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(model, models.loader())
    result[scenario] = {"digest": models.digest(model), "steps": trainer.global_step}
rank = trainer.global_rank
Path(folder, f"rank-{rank}.json").write_text(json.dumps(result))
if torch.distributed.is_initialized():  # Gloo's threads must not outlive the interpreter
    torch.distributed.destroy_process_group()
