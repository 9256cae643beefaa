"""A training script that seeds NumPy, and forgets torch."""

import argparse

import numpy as np
import torch
from sklearn.linear_model import LogisticRegression
from torch import nn

from mylib import read_batches


def pretrain(model, batches):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs, targets in batches:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()  # expect: D9M210
        optimizer.step()


def train(model, batches):
    """Where a seed would help: torch.manual_seed(0)."""
    optimizer = torch.optim.AdamW(model.parameters())
    for inputs, targets in batches:
        loss = nn.functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()  # fine
        optimizer.step()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    np.random.seed(arguments.seed)  # fine
    print(torch.initial_seed())  # fine
    batches = read_batches()
    LogisticRegression().fit(*batches[0])  # fine
    model = nn.Linear(8, 2)
    pretrain(model, batches)
    train(model, batches)


if __name__ == "__main__":
    main()
