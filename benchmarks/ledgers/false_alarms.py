"""Count of equal runs that are called different: pairs of clean trainings with every probe on.

    python benchmarks/ledgers/false_alarms.py -o benchmarks/results/false-alarms-cpu.json

Each pair trains one small model twice, with another seed, another architecture and another loader
than its neighbors, and compares the two ledgers as `d9m compare` does.
"""

import argparse
import json
import sys
import tempfile
import time
import warnings
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_d9m import DeterminismCallback
from lightning_d9m.engine.control import session
from lightning_d9m.engine.ledger.folder import read_ledger
from lightning_d9m.tools.comparison.ledgers import compare_ledgers

sys.path.insert(0, str(Path(__file__).parents[1]))
from measurement import QUIET


class Last(nn.Module):
    """Takes the last step of a recurrent net's output."""

    def forward(self, outputs):
        """Return it."""
        return outputs[0][:, -1]


class Rows(nn.Module):
    """Takes an image for a sequence of rows."""

    def forward(self, images):
        """Return it."""
        return images.flatten(2).reshape(len(images), 8, 8)


def build(number):
    """Return one of four nets: dense, convolutional, recurrent, with attention."""
    match number % 4:
        case 0:
            layers = [nn.Flatten(), nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU()]
            layers += [nn.Dropout(0.3), nn.Linear(32, 10)]
        case 1:
            layers = [nn.Conv2d(1, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.GELU()]
            layers += [nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 10)]
        case 2:
            layers = [Rows(), nn.LSTM(8, 16, batch_first=True), Last(), nn.Linear(16, 10)]
        case _:
            attention = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
            layers = [Rows(), attention, nn.Flatten(), nn.Linear(64, 10)]
    return nn.Sequential(*layers)


class Classifier(pl.LightningModule):
    """Any of the nets."""

    def __init__(self, number):
        super().__init__()
        self.number = number
        self.layers = build(number)

    def training_step(self, batch, _):
        """Return the loss."""
        loss = nn.functional.cross_entropy(self.layers(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        """Return an optimizer of one of three kinds."""
        kind = (torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop)[self.number % 3]
        return kind(self.parameters(), lr=0.01)


def train(number, folder):
    """Train as a run of its own would; return the ledger."""
    session._fits = 0  # noqa: SLF001 - as in a new process
    generator = torch.Generator().manual_seed(number)
    images = torch.rand(48, 1, 8, 8, generator=generator)
    data = TensorDataset(images, torch.randint(10, (48,), generator=generator))
    pl.seed_everything(number, verbose=False)
    trainer = pl.Trainer(
        max_epochs=2,
        **QUIET,
        callbacks=[DeterminismCallback(seed=number, ledger_dir=folder, probes="all")],
    )
    workers = 1 if number % 10 == 9 else 0
    loader = DataLoader(data, 8 + number % 5, shuffle=True, num_workers=workers)
    trainer.fit(Classifier(number), loader)
    return read_ledger(folder)


def main():
    """Compare the pairs, print, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-n", "--pairs", type=int, default=100)
    parser.add_argument("-o", "--output", type=Path)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    begun = time.perf_counter()
    alarms, places, batches = [], 0, 0
    for number in range(arguments.pairs):
        with tempfile.TemporaryDirectory() as folder:
            ledgers = [train(number, Path(folder) / name) for name in ("one", "other")]
            found = compare_ledgers(*ledgers)
            places += sum(rank.places for rank in found.ranks)
            batches += sum(rank.batches for rank in found.ranks)
            if found.verdict != "equal":
                alarms.append([number, found.verdict])
    result = {
        "pairs": arguments.pairs,
        "false_alarms": len(alarms),
        "which": alarms,
        "batches": batches,
        "places": places,
        "seconds": round(time.perf_counter() - begun, 1),
    }
    print(json.dumps(result))
    if arguments.output:
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    sys.exit(bool(alarms))


if __name__ == "__main__":
    main()
