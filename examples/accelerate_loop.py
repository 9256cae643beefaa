"""Train on scikit-learn's digits with Accelerate, bit-exactly, with a ledger.

Run it once:                     python examples/accelerate_loop.py
Prove that it is bit-exact:      d9m repeat -n 2 -- python examples/accelerate_loop.py
Stop it and go on:               python examples/accelerate_loop.py --epochs 1
                                 python examples/accelerate_loop.py --resume
On two processes:                accelerate launch --multi_gpu --num_processes 2 \
                                     examples/accelerate_loop.py  (--cpu starts only one)
"""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_d9m


def make_loader() -> DataLoader[tuple[torch.Tensor, ...]]:
    """Return the digits in shuffled batches of 64, which Accelerate divides among processes."""
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    dataset = TensorDataset(images, torch.tensor(digits.target))
    return DataLoader(dataset, batch_size=64, shuffle=True)


def train(folder: Path, *, epochs: int = 3, resume: bool = False) -> lightning_d9m.Recorder:
    """Train, and return the closed recorder, which names the ledger."""
    accelerator = Accelerator(cpu=True)
    checkpoint = folder / "checkpoint"
    generators = folder / f"run-{accelerator.process_index}.pt"  # each process has its own
    with lightning_d9m.deterministic(seed=42):
        network = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 10))
        optimizer = torch.optim.AdamW(network.parameters(), lr=2e-3)
        model, optimizer, loader = accelerator.prepare(network, optimizer, make_loader())
        with lightning_d9m.Recorder(folder, model, optimizer) as run:
            if resume:
                accelerator.load_state(str(checkpoint))
                run.load_state_dict(torch.load(generators, weights_only=True))
            for epoch in range(run.next_epoch, epochs):
                for images, classes in run.batches(loader):
                    loss = nn.functional.cross_entropy(model(images), classes)
                    optimizer.zero_grad()
                    accelerator.backward(loss)
                    optimizer.step()
                    run.step(loss=loss)
                run.epoch(epoch)
                accelerator.save_state(str(checkpoint))
                torch.save(run.state_dict(), generators)
    return run


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint")
    parser.add_argument("--folder", type=Path, default=Path("runs"))
    arguments = parser.parse_args()
    arguments.folder.mkdir(exist_ok=True)
    finished = train(arguments.folder, epochs=arguments.epochs, resume=arguments.resume)
    print(f"ledger: {finished.ledger}, weights: {finished.digest}")
