"""Train on scikit-learn's digits in a plain loop of torch, bit-exactly, with a ledger.

Run it once:                     python examples/plain_torch.py
Prove that it is bit-exact:      d9m repeat -n 2 -- python examples/plain_torch.py
Stop it and go on:               python examples/plain_torch.py --epochs 1
                                 python examples/plain_torch.py --resume
On two processes:                torchrun --nproc-per-node 2 examples/plain_torch.py
"""

import argparse
import os
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import lightning_d9m


def make_loader(ranks: int) -> DataLoader[tuple[torch.Tensor, ...]]:
    """Return the digits in batches of 64, shuffled; with several ranks, a part for each."""
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    dataset = TensorDataset(images, torch.tensor(digits.target))
    sampler = DistributedSampler(dataset) if ranks > 1 else None
    return DataLoader(dataset, batch_size=64, sampler=sampler, shuffle=sampler is None)


def train(folder: Path, *, epochs: int = 3, resume: bool = False) -> lightning_d9m.Recorder:
    """Train, and return the closed recorder, which names the ledger."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    rank = int(os.environ.get("RANK", "0"))
    checkpoint = folder / f"checkpoint-{rank}.pt"
    with lightning_d9m.deterministic(seed=42):
        model: nn.Module = nn.Sequential(
            nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 10)
        )
        if ranks > 1:
            model = DistributedDataParallel(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
        loader = make_loader(ranks)
        with lightning_d9m.Recorder(folder, model, optimizer) as run:
            if resume:
                saved = torch.load(checkpoint, weights_only=True)
                model.load_state_dict(saved["state_dict"])
                optimizer.load_state_dict(saved["optimizer"])
                run.load_state_dict(saved["run"])
            for epoch in range(run.next_epoch, epochs):
                for images, classes in run.batches(loader):
                    loss = nn.functional.cross_entropy(model(images), classes)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    run.step(loss=loss)
                run.epoch(epoch)
                states = {"state_dict": model.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save({**states, "run": run.state_dict()}, checkpoint)
    return run


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint")
    parser.add_argument("--folder", type=Path, default=Path("runs"))
    arguments = parser.parse_args()
    if "WORLD_SIZE" in os.environ:
        distributed.init_process_group("gloo")
    arguments.folder.mkdir(exist_ok=True)
    finished = train(arguments.folder, epochs=arguments.epochs, resume=arguments.resume)
    print(f"ledger: {finished.ledger}, weights: {finished.digest}")
    if distributed.is_initialized():
        distributed.destroy_process_group()
