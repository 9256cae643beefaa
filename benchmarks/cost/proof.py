"""The cost of a proof: the share of a fit, the size for 1,000 epochs, and the time to write it.

The share is the CPU time, of all threads, within the functions that commit, over that of the fit,
so that neither the noise of whole fits counts nor what else the machine does:

    python benchmarks/cost/proof.py [--epochs 6] [prove] [digits] [10M]
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1]))

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from measurement import QUIET, RESULTS, describe_machine, keep
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_d9m import DeterminismCallback
from lightning_d9m.engine.recording import commitment
from lightning_d9m.tools.cli.main import main

MODELS = {
    # Inputs, width and samples: a network for digits, and a perceptron with 10 million weights.
    "digits": (64, 128, 1797),
    "10M": (1024, 2048, 4096),
    "short epochs": (64, 128, 128),
}


class Net(L.LightningModule):
    """A perceptron that is trained with Adam."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        hidden = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
        self.layers = nn.Sequential(nn.Linear(inputs, width), nn.ReLU(), hidden)

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        """Return the loss of a batch."""
        return nn.functional.cross_entropy(self.layers(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return Adam."""
        return torch.optim.Adam(self.parameters(), 1e-3)


def fit(name: str, epochs: int, folder: Path, every: int = 1) -> dict[str, float]:
    """Train, and return the CPU seconds of the fit and of each function that commits."""
    inputs, width, samples = MODELS[name]
    spent = {"chain_batch": 0.0, "hash_state": 0.0, "find_sources": 0.0}

    def timed(function: str, original: Any) -> Any:
        def call(*args: Any) -> Any:
            start = time.process_time()
            try:
                return original(*args)
            finally:
                spent[function] += time.process_time() - start

        return call

    L.seed_everything(1)
    data = TensorDataset(torch.randn(samples, inputs), torch.randint(10, (samples,)))
    callbacks = [
        DeterminismCallback(ledger_dir=folder, provable=True),
        ModelCheckpoint(folder / "saved", save_top_k=-1, every_n_epochs=every),
    ]
    given = {**QUIET, "enable_checkpointing": True, "callbacks": callbacks}
    trainer = L.Trainer(max_epochs=epochs, **given)
    with mock.patch.multiple(
        commitment, **{own: timed(own, getattr(commitment, own)) for own in spent}
    ):
        start = time.process_time()
        trainer.fit(Net(inputs, width), DataLoader(data, 64, shuffle=True))
    return {"fit": time.process_time() - start, **spent}


def measure_prove() -> dict[str, Any]:
    """Return the time to prove a run of 1,000 epochs, and the size of the proof."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        fit("short epochs", 1000, path / "run", every=10)
        start = time.perf_counter()
        assert main(["prove", str(path / "run/fit-000"), "-o", str(path / "proof.json")]) == 0
        return {
            "seconds": round(time.perf_counter() - start, 2),
            "bytes for 1,000 epochs and 100 checkpoints": (path / "proof.json").stat().st_size,
        }


def measure_share(name: str, epochs: int) -> dict[str, Any]:
    """Return the CPU seconds of a fit and of what commits, and its share."""
    with tempfile.TemporaryDirectory() as folder:
        fit(name, 1, Path(folder) / "warm")
        seconds = fit(name, epochs, Path(folder) / "run")
        committing = sum(seconds.values()) - seconds["fit"]
        parts = {own: round(seconds[own], 4) for own in seconds}
        return {"epochs": epochs, "seconds": parts, "share": round(committing / seconds["fit"], 4)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("parts", nargs="*", default=["prove", "digits", "10M"])
    parser.add_argument("--epochs", type=int, default=6)
    arguments = parser.parse_args()
    found = {}
    for part in arguments.parts:  # d9m prove is first, because it takes the first fit of a program
        found[part] = measure_prove() if part == "prove" else measure_share(part, arguments.epochs)
    keep(RESULTS / "proof.json", {"machine": describe_machine(), **found})
