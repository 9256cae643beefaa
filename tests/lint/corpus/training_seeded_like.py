"""The same, with a function of its own that seeds."""

import torch
from torch import nn

from mylib import read_batches, set_random_seed


def train(model, batches):
    optimizer = torch.optim.AdamW(model.parameters())
    for inputs, targets in batches:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()  # fine
        optimizer.step()


if __name__ == "__main__":
    set_random_seed(7)
    train(nn.Linear(8, 2), read_batches())
