"""A training of 60 steps with four checkpoints, in which the variable WRONG may change one thing.

Its ledger and its checkpoints go to the folder that is its argument.
"""

import os
import sys
import time

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, Sampler, TensorDataset

from lightning_d9m import DeterminismCallback

BATCH = 8
STEP = 25  # at which, or from which, something is wrong
WRONG = os.environ.get("WRONG", "")
TRAINER = {
    "extra step": {"max_steps": 61, "max_epochs": 4},
    "early end": {"max_steps": 57},
    "clipped": {"gradient_clip_val": 0.1},
    "accumulated": {"accumulate_grad_batches": 2},
}


class Order(Sampler):
    """Another order in each epoch, which depends on its number alone."""

    epoch = 0

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        epoch = {1: 2, 2: 1}.get(self.epoch, 0) if WRONG == "swapped epoch" else self.epoch
        own = torch.randperm(self.size, generator=torch.Generator().manual_seed(epoch)).tolist()
        place = (STEP - 20) * BATCH
        if WRONG == "skipped batch" and epoch == 1:
            own = own[:place] + own[place + BATCH :] + own[:BATCH]
        if WRONG == "repeated batch" and epoch == 1:
            own[place : place + BATCH] = own[place - BATCH : place]
        return iter(own)


def flip(tensor, bit=0):
    """Flip a bit of the first number, the last one by default."""
    tensor.detach().view(torch.int32).view(-1)[0] ^= 1 << bit


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        hidden = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1))
        self.layers = nn.Sequential(hidden, nn.Linear(32, 4))
        if WRONG == "initial weight":
            flip(self.layers[1].weight)
        if WRONG == "frozen":
            self.layers[1].bias.requires_grad_(False)

    def is_wrong(self, *names):
        """Return whether the step under way is wrong in one of these ways."""
        return WRONG in names and self.trainer.global_step == STEP

    def on_train_batch_start(self, *_):
        late = self.trainer.global_step >= STEP
        if WRONG == "dropout" and late:
            self.layers[0][3].p = 0.0
        if WRONG == "momentum" and late:
            self.layers[0][1].momentum = 0.2
        for group in self.optimizers().param_groups if late else ():
            if WRONG == "rate":
                group["lr"] = 1.01e-3
            if WRONG == "beta":
                group["betas"] = (0.9, 0.99)
        if self.is_wrong("generator"):
            torch.rand(1)

    def training_step(self, batch, _):
        x, y = batch
        time.sleep(float(os.environ.get("SLOW", "0")))
        if self.is_wrong("batch bit"):
            flip(x)
        with torch.autocast("cpu", torch.bfloat16, enabled=self.is_wrong("precision")):
            loss = nn.functional.cross_entropy(self.layers(x), y)
        if WRONG == "loss" and self.trainer.global_step >= STEP:
            loss = loss * 1.001
        self.log("loss", loss * (2 if WRONG == "logged" and self.current_epoch else 1))
        return loss

    def on_before_optimizer_step(self, _):
        if self.is_wrong("gradient bit"):
            flip(self.layers[1].weight.grad, 12)  # Adam rounds the last bit away

    def on_train_batch_end(self, *_):
        if WRONG == "weight bit" and self.trainer.global_step == STEP:
            flip(self.layers[1].weight)
        if WRONG == "state bit" and self.trainer.global_step == STEP:
            flip(self.optimizers().state[self.layers[1].weight]["exp_avg"], 12)

    def configure_optimizers(self):
        decay = 0.01 if WRONG == "decay" else 0.0
        optimizer = torch.optim.Adam(self.parameters(), 1e-3, weight_decay=decay)
        gamma = 0.8 if WRONG == "schedule" else 0.9
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma)]


def make_data():
    generator = torch.Generator().manual_seed(int(WRONG == "other data"))
    x = torch.randn(20 * BATCH + (WRONG == "one sample more"), 16, generator=generator)
    y = x[:, :4].argmax(1)
    if WRONG == "label":
        y[3] = (y[3] + 1) % 4
    if WRONG == "input":
        flip(x[5], 12)
    return TensorDataset(x, y)


def train(folder):
    L.seed_everything(2 if WRONG == "seed" else 1, verbose=False)
    data = make_data()
    size = 2 * BATCH if WRONG == "batch size" else BATCH
    kept = int(os.environ.get("KEPT", "-1"))
    saving = ModelCheckpoint(f"{folder}/saved", "{step}", save_top_k=kept, every_n_train_steps=15)
    trainer = L.Trainer(
        accelerator="cpu",
        callbacks=[DeterminismCallback(ledger_dir=folder), saving],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"max_epochs": 3, **TRAINER.get(WRONG, {})},
    )
    # Batch normalization needs more than the one sample that would be left.
    order, drops = Order(len(data)), WRONG == "one sample more"
    trainer.fit(Net(), DataLoader(data, size, sampler=order, drop_last=drops))


if __name__ == "__main__":
    train(sys.argv[1])
