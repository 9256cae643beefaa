"""Models and data of the worker scripts, equal on every rank."""

import random
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_d9m.hashing.digest import digest_value


def digest(module):
    """Return the digest of all parameters and buffers."""
    return digest_value(module.state_dict())


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


def many_small_layers(count=50):
    """Return many small parameters, for which Horovod's own fusion is designed."""
    layers = [nn.Linear(24, 24) for _ in range(count)]
    return nn.Sequential(*(part for layer in layers for part in (layer, nn.Tanh())))


def jitter(module):
    """Delay gradients by unseeded times, so that the order in which ranks are ready varies."""
    chance = random.SystemRandom()

    def delay(gradient):
        if chance.random() < 0.1:
            time.sleep(chance.random() * 0.003)
        return gradient

    for parameter in module.parameters():
        parameter.register_hook(delay)
