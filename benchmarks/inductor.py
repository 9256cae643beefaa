"""Bits of a training that Inductor compiles: with a cold and a warm cache, without one, resumed.

    python benchmarks/inductor.py -o benchmarks/results/inductor.json

Each training is a process. The first and the third have an empty cache each, the second has that of
the first, the fourth none. The fifth is resumed within an epoch, with a warm cache. Each ledger is
compared with the first; a training with other dropout must differ.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_d9m import DeterminismCallback
from lightning_d9m.comparison.ledgers import compare_ledgers
from lightning_d9m.ledger.folder import read_ledger

# name: folder of the cache, variables, whether a checkpoint is resumed, rate of dropout
RUNS = {
    "cold": ("a", {}, False, 0.3),
    "warm": ("a", {}, False, 0.3),
    "cold again": ("b", {}, False, 0.3),
    "no cache": ("c", {"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}, False, 0.3),
    "resumed": ("a", {}, True, 0.3),
    "other dropout": ("a", {}, False, 0.4),
}


class Net(pl.LightningModule):
    """A classifier whose layers are compiled."""

    def __init__(self, rate):
        super().__init__()
        self.layers = torch.compile(
            nn.Sequential(
                nn.Linear(64, 32), nn.LayerNorm(32), nn.GELU(), nn.Dropout(rate), nn.Linear(32, 10)
            )
        )

    def training_step(self, batch, _):
        """Return the loss."""
        return nn.functional.cross_entropy(self.layers(batch[0]), batch[1])

    def configure_optimizers(self):
        """Use Adam."""
        return torch.optim.Adam(self.parameters(), lr=0.01)


def train(folder, name):
    """Train two epochs of 6 batches."""
    warnings.filterwarnings("ignore")
    _, _, resumes, rate = RUNS[name]
    generator = torch.Generator().manual_seed(1)
    images = torch.rand(96, 64, generator=generator)
    classes = torch.randint(0, 10, (96,), generator=generator)
    torch.manual_seed(2)
    saver = ModelCheckpoint(folder / name, filename="{step}", every_n_train_steps=3, save_top_k=-1)
    trainer = pl.Trainer(
        max_epochs=2,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[DeterminismCallback(seed=3, ledger_dir=folder / name / "d9m"), saver],
    )
    loader = DataLoader(TensorDataset(images, classes), batch_size=16, shuffle=True)
    checkpoint = folder / "cold" / "step=9.ckpt" if resumes else None
    trainer.fit(Net(rate), loader, ckpt_path=checkpoint)


def main():
    """Run all trainings; print and keep what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--train", nargs=2, metavar=("FOLDER", "NAME"))
    arguments = parser.parse_args()
    if arguments.train:
        train(Path(arguments.train[0]), arguments.train[1])
        return
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        first = None
        for name, (cache, variables, _, _) in RUNS.items():
            own = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/cache-{cache}", "PYTHONHASHSEED": "0"}
            start = time.perf_counter()
            subprocess.run(
                [sys.executable, __file__, "--train", folder, name],
                env=os.environ | own | variables,
                check=True,
                capture_output=True,
            )
            ledger = read_ledger(Path(folder) / name / "d9m")
            first = first or ledger
            stack = ledger.header.stack
            found[name] = {
                "verdict": compare_ledgers(first, ledger).verdict,
                "seconds": round(time.perf_counter() - start, 1),
                **{key: stack[key] for key in stack if key.startswith("compiler.")},
                **{key: stack[key] for key in stack if key.startswith("flag.inductor.")},
            }
            print(name, found[name], flush=True)
        facts = {key: first.header.stack[key] for key in ("torch.version", "cpu.model")}
    if arguments.output is not None:
        arguments.output.write_text(json.dumps({**facts, "runs": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
