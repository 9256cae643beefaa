"""Small trainings that differ from run to run, each by one real cause; see test_gallery.py."""

import os
import sys
import time
import warnings

import lightning.pytorch as L
import numpy as np
import torch
from autoload_training import QUIET
from torch import nn
from torch.utils.data import DataLoader, Dataset

CAUSE = sys.argv[1] if len(sys.argv) > 1 else "none"


class Samples(Dataset):
    """Sixteen samples, augmented with noise."""

    def __init__(self):
        self.samples = torch.randn(16, 4)
        self.noise = np.random.default_rng()
        names = {f"sample {number}" for number in range(16)}
        self.order = [int(name[7:]) for name in names] if CAUSE == "set" else range(16)

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        sample = self.samples[self.order[index]]
        if CAUSE == "urandom":
            return sample + 0.01 * os.urandom(1)[0]
        if CAUSE == "default_rng":
            return sample + 0.01 * float(self.noise.random())
        return sample


class Net(L.LightningModule):
    """A net with dropout, trained for four steps."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        self.own = torch.Generator()
        self.own.seed()
        if CAUSE == "initial":
            with torch.no_grad():
                self.layers[0].weight += torch.from_numpy(np.random.default_rng().random((8, 4)))

    def training_step(self, batch, batch_idx):
        if CAUSE == "generator":
            batch = batch * torch.rand(batch.shape, generator=self.own)
        return self.layers(batch).square().mean()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if CAUSE == "ulp" and batch_idx == 1 and time.time_ns() // 1000 % 2**20:
            with torch.no_grad():
                bits = self.layers[0].weight.view(torch.int32)
                bits[0, 0] ^= int.from_bytes(os.urandom(1), "big") + 1

    def on_after_backward(self):
        if CAUSE == "gradient" and self.global_step == 2:
            gradient = self.layers[2].weight.grad
            gradient.view(torch.int32)[0, 0] ^= int.from_bytes(os.urandom(1), "big") + 1

    def configure_optimizers(self):
        rate = 0.1 + 1e-9 * (time.time_ns() % 10**6) if CAUSE == "clock" else 0.1
        return torch.optim.SGD(self.parameters(), rate)


def main():
    """Train once."""
    warnings.filterwarnings("ignore")
    loader = DataLoader(Samples(), batch_size=4, shuffle=True)
    trainer = L.Trainer(max_epochs=1, **QUIET)
    trainer.fit(Net(), loader)


if __name__ == "__main__":
    main()
