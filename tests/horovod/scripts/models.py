"""Models and data of the worker scripts, equal on every rank."""

import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).parents[2] / "support"))  # what all tests share


def loader(samples=64, batch_size=8, shuffle=True):
    """Return a regression problem from a separate generator."""
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(samples, 8, generator=generator)
    targets = inputs.pow(2).sum(1, keepdim=True) + torch.randn(samples, 1, generator=generator)
    return DataLoader(TensorDataset(inputs, targets), batch_size=batch_size, shuffle=shuffle)


def network():
    """Return three layers with dropout and batch normalization."""
    return nn.Sequential(
        nn.Linear(8, 33), nn.BatchNorm1d(33), nn.ReLU(), nn.Dropout(0.1), nn.Linear(33, 1)
    )
