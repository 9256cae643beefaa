"""Bits of a training that Inductor compiles: caches, a resume, patched operations and probes.

    python benchmarks/inductor.py -o benchmarks/results/inductor.json

Each training is a process. The first and the third have an empty cache each, the second has that of
the first, the fourth none. The fifth is resumed within an epoch, with a warm cache. Each ledger is
compared with the first; a training with other dropout must differ.

A spatial transformer is trained with patched operations, of which the calls are counted, and with
all probes, of which kinds and names are kept; eagerly and compiled. Inductor may compile a patched
operation or call it.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from contextlib import contextmanager, nullcontext
from pathlib import Path
from unittest import mock

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_d9m import DeterminismCallback
from lightning_d9m.engine.ledger.folder import read_ledger
from lightning_d9m.engine.ledger.format.records import Batch
from lightning_d9m.ops.patches import registration
from lightning_d9m.tools.comparison.ledgers import compare_ledgers

# name: folder of the cache, variables, whether a checkpoint is resumed, rate of dropout
RUNS = {
    "cold": ("a", {}, False, 0.3),
    "warm": ("a", {}, False, 0.3),
    "cold again": ("b", {}, False, 0.3),
    "no cache": ("c", {"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}, False, 0.3),
    "resumed": ("a", {}, True, 0.3),
    "other dropout": ("a", {}, False, 0.4),
}
# name: whether it is compiled, patched, probed
TRANSFORMERS = {
    "eager, patched": (False, True, False),
    "eager, probed": (False, False, True),
    "compiled": (True, False, False),
    "compiled, probed": (True, False, True),
    "compiled, patched": (True, True, False),
    "compiled, patched again": (True, True, False),
}


class Warp(nn.Module):
    """Samples an image at learned places, and pads the result."""

    def __init__(self):
        super().__init__()
        self.theta = nn.Parameter(torch.tensor([[0.9, 0.1, 0.0], [-0.1, 0.9, 0.0]]))

    def forward(self, images):
        """Return the flat images, padded at both ends."""
        images = images.view(-1, 1, 8, 8)
        theta = self.theta.expand(len(images), 2, 3)
        grid = nn.functional.affine_grid(theta, images.shape, align_corners=False)
        warped = nn.functional.grid_sample(images, grid, align_corners=False)
        return nn.functional.pad(warped.view(-1, 64), (1, 1), mode="reflect")


def make_layers(rate):
    """Return the layers of a classifier."""
    return nn.Sequential(
        nn.Linear(64, 32), nn.LayerNorm(32), nn.GELU(), nn.Dropout(rate), nn.Linear(32, 10)
    )


def make_transformer():
    """Return the layers of a classifier that first moves the pixels of the image."""
    return nn.Sequential(nn.Linear(64, 64), Warp(), nn.Linear(66, 10))


class Net(pl.LightningModule):
    """A classifier."""

    def __init__(self, layers):
        super().__init__()
        self.layers = layers

    def training_step(self, batch, _):
        """Return the loss."""
        return nn.functional.cross_entropy(self.layers(batch[0]), batch[1])

    def configure_optimizers(self):
        """Use Adam."""
        return torch.optim.Adam(self.parameters(), lr=0.01)


@contextmanager
def calls_counted(path):
    """Patch the operations of a CPU, and write how often each is called."""
    calls = Counter()

    call = registration.Kernel.__call__

    def count(kernel, *args, **kwargs):
        calls[kernel._name] += 1  # noqa: SLF001 - nothing else tells kernels apart
        return call(kernel, *args, **kwargs)

    counted = mock.patch.object(registration.Kernel, "__call__", count)
    with counted, registration.patches_applied("CPU"):
        yield
    path.write_text(json.dumps(calls))


def train(folder, name):
    """Train two epochs of 6 batches."""
    warnings.filterwarnings("ignore")
    compiles, patched, probed = TRANSFORMERS.get(name, (True, False, False))
    _, _, resumes, rate = RUNS.get(name, ("", {}, False, 0.0))
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
        callbacks=[
            DeterminismCallback(
                seed=3, ledger_dir=folder / name / "d9m", probes="all" if probed else ()
            ),
            saver,
        ],
    )
    loader = DataLoader(TensorDataset(images, classes), batch_size=16, shuffle=True)
    checkpoint = folder / "cold" / "step=9.ckpt" if resumes else None
    layers = make_transformer() if name in TRANSFORMERS else make_layers(rate)
    (folder / name).mkdir(parents=True, exist_ok=True)
    counted = calls_counted(folder / name / "calls.json") if patched else nullcontext()
    with counted:
        trainer.fit(
            Net(torch.compile(layers) if compiles else layers), loader, ckpt_path=checkpoint
        )


def list_probes(ledger):
    """Return the names that each kind of probe has in the first batch."""
    places = {}
    for frame in ledger.records(0):
        if isinstance(frame, Batch) and frame.batch == frame.epoch == 0:
            for kind, name, _ in itertools.chain(*frame.layouts):
                places.setdefault(kind, set()).add(name)
    return {kind: sorted(names) for kind, names in sorted(places.items())}


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
        firsts = {}
        runs = {name: run[:2] for name, run in RUNS.items()}
        runs |= {name: ("d" if "patched" in name else "e", {}) for name in TRANSFORMERS}
        for name, (cache, variables) in runs.items():
            own = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/cache-{cache}", "PYTHONHASHSEED": "0"}
            start = time.perf_counter()
            subprocess.run(
                [sys.executable, __file__, "--train", folder, name],
                env=os.environ | own | variables,
                check=True,
                capture_output=True,
            )
            ledger = read_ledger(Path(folder) / name / "d9m")
            first = firsts.setdefault(TRANSFORMERS.get(name), ledger)
            stack = ledger.header.stack
            found[name] = {
                "verdict": compare_ledgers(first, ledger).verdict,
                "weights": ledger.outcome(0).last.totals["weights"],
                "seconds": round(time.perf_counter() - start, 1),
                **{key: stack[key] for key in stack if key.startswith("compiler.")},
                **{key: stack[key] for key in stack if key.startswith("flag.inductor.")},
            }
            calls = Path(folder) / name / "calls.json"
            if calls.exists():
                found[name]["calls"] = json.loads(calls.read_text())
            if "probed" in name:
                found[name]["probes"] = list_probes(ledger)
            print(name, found[name], flush=True)
        facts = {key: firsts[None].header.stack[key] for key in ("torch.version", "cpu.model")}
    if arguments.output is not None:
        arguments.output.write_text(json.dumps({**facts, "runs": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
