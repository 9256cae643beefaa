"""Memory of a long run with every probe on, and of many fits in one process.

    python benchmarks/soak.py -o benchmarks/results/soak.json

A digits net trains 10,000 steps with all probes: the resident memory at every 1,000th step, its
slope from the 2,000th on, and the bytes of the ledger for each digest, which takes 16 by
docs/ledger.md. Then 200 fits of one epoch follow in the same process, and 200 without the callback:
after every 20th the resident memory, the objects that Python tracks, threads and open files.
"""

import argparse
import gc
import json
import platform
import tempfile
import threading
import time
import warnings
from importlib.metadata import version
from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_d9m import DeterminismCallback
from lightning_d9m.engine.ledger.folder import read_ledger
from lightning_d9m.engine.ledger.format.records import Batch
from lightning_d9m.engine.ledger.stack import capture_stack

QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class Net(pl.LightningModule):
    """A classifier of 8 x 8 images."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 10)
        )

    def training_step(self, batch, _):
        """Return the loss."""
        loss = nn.functional.cross_entropy(self.layers(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        """Use Adam."""
        return torch.optim.Adam(self.parameters(), lr=0.001)


class Watch(pl.Callback):
    """Reads the memory at every so many steps."""

    def __init__(self, every):
        self.every = every
        self.megabytes = {}

    def on_train_batch_end(self, trainer, *_):
        """Read it."""
        if trainer.global_step % self.every == 0:
            self.megabytes[trainer.global_step] = read_memory()


def read_memory():
    """Return the resident memory of this process in MiB, after a garbage collection."""
    gc.collect()
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) / 1024


def make_loader(samples):
    """Return a shuffled loader of batches of 16."""
    generator = torch.Generator().manual_seed(1)
    images = torch.rand(samples, 64, generator=generator)
    classes = torch.randint(0, 10, (samples,), generator=generator)
    return DataLoader(TensorDataset(images, classes), batch_size=16, shuffle=True)


def fit(folder, samples, *callbacks, **words):
    """Train; without a folder, without the callback. Return the ledger's folder."""
    controls = []
    if folder is not None:
        controls.append(DeterminismCallback(seed=1, ledger_dir=folder, probes="all"))
    trainer = pl.Trainer(callbacks=[*controls, *callbacks], **QUIET, **words)
    torch.manual_seed(2)
    trainer.fit(Net(), make_loader(samples))
    return controls[0].ledger if controls else None


def soak(folder, steps):
    """Train many steps; return memory and the size of the ledger."""
    watch = Watch(steps // 10)
    start = time.perf_counter()
    ledger = fit(folder, 1600, watch, max_steps=steps, max_epochs=-1)
    seconds = time.perf_counter() - start
    frames = [found for found in read_ledger(ledger).records(0) if isinstance(found, Batch)]
    digests = sum(found.size for found in frames)
    written = (ledger / "rank-0.jsonl").stat().st_size
    assert len(frames) == steps, "every step was probed"
    readings = {step: round(value, 2) for step, value in watch.megabytes.items()}
    kept = [(step, value) for step, value in watch.megabytes.items() if step > steps // 10]
    slope = np.polyfit(*zip(*kept, strict=True), 1)[0]
    return {
        "steps": steps,
        "seconds": round(seconds, 1),
        "memory_mib": readings,
        "slope_bytes_per_step": round(slope * 2**20, 2),
        "digests_per_step": round(digests / steps, 2),
        "bytes_per_step": round(written / steps, 2),
        "bytes_per_digest": round(written / digests, 3),
        "bytes_of_other_records": (ledger / "rank-0.jsonl").stat().st_size,
    }


def repeat(folder, fits):
    """Fit many times; return what the process holds after each tenth of the fits."""
    readings = []
    for number in range(1, fits + 1):
        fit(folder, 64, max_epochs=1)
        if number % (fits // 10) == 0:
            memory = round(read_memory(), 2)
            readings.append(
                {
                    "fits": number,
                    "memory_mib": memory,
                    "objects": len(gc.get_objects()),
                    "threads": threading.active_count(),
                    "files": len(list(Path("/proc/self/fd").iterdir())),
                }
            )
    first, last = readings[0], readings[-1]
    between = last["fits"] - first["fits"]
    growth = {
        name: round((last[name] - first[name]) / between, 3)
        for name in ("memory_mib", "objects", "threads", "files")
    }
    return {"fits": fits, "readings": readings, "growth_per_fit": growth}


def main():
    """Run both, print and keep the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--fits", type=int, default=200)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        found = {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "lightning": version("lightning"),
            "processor": capture_stack()["cpu.model"],
            "soak": soak(Path(folder) / "soak", arguments.steps),
            "repeated": repeat(Path(folder) / "fits", arguments.fits),
            "repeated_without_callback": repeat(None, arguments.fits),
        }
    text = json.dumps(found, indent=1)
    print(text)
    if arguments.output is not None:
        arguments.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
