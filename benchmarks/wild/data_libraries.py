"""Train on the loaders of data libraries twice, and resume within and after an epoch.

    pip install datasets webdataset litdata torchdata
    python benchmarks/wild/data_libraries.py

Each loader gives 6 batches of 16 samples that were written to a temporary folder. A fit of three
epochs is repeated, interrupted after two batches and after the second epoch, and resumed; each fit
is compared with the first. Results go to ``benchmarks/results/data-libraries.json``: for each
loader ``exact``, or the error. An unseeded shuffle must differ, and shows that a difference is
found.
"""

import importlib.metadata
import io
import json
import logging
import tarfile
import tempfile
import warnings
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import lightning as L
import litdata
import numpy as np
import torch
import webdataset
from lightning.pytorch.callbacks import ModelCheckpoint
from litdata.streaming.writer import BinaryWriter
from torch import nn
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_d9m import DeterminismCallback
from lightning_d9m.engine.control import session
from lightning_d9m.errors import D9mError

RESULT = Path(__file__).parents[1] / "results" / "data-libraries.json"
LIBRARIES = ("datasets", "webdataset", "litdata", "torchdata", "torch", "lightning")
SAMPLES, BATCH = 96, 16
GENERATOR = np.random.default_rng(0)
IMAGES = GENERATOR.normal(size=(SAMPLES, 64)).astype("float32")
CLASSES = GENERATOR.integers(0, 10, SAMPLES)
QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class Net(L.LightningModule):
    """A small classifier."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 32), nn.Dropout(0.3), nn.Linear(32, 10))

    def training_step(self, batch, _):
        """Return the loss."""
        images, classes = batch.values() if isinstance(batch, dict) else batch
        return nn.functional.cross_entropy(self.layers(images), classes)

    def configure_optimizers(self):
        """Use Adam."""
        return torch.optim.Adam(self.parameters(), lr=0.01)


def mapped(loader, workers, _):
    """Shuffle a map-style dataset of Hugging Face in the loader."""
    data = datasets.Dataset.from_dict({"x": IMAGES, "y": CLASSES}).with_format("torch")
    return loader(data, batch_size=BATCH, shuffle=True, num_workers=workers)


def streamed(loader, workers, _, seed=3):
    """Shuffle an iterable dataset of Hugging Face in a buffer."""
    data = datasets.Dataset.from_dict({"x": IMAGES, "y": CLASSES}).with_format("torch")
    stream = data.to_iterable_dataset(num_shards=4).shuffle(seed=seed, buffer_size=32)
    return loader(stream, batch_size=BATCH, num_workers=workers)


def tarred(loader, workers, folder, seed=1):
    """Read a tar file by WebDataset, and shuffle in a buffer."""
    path = folder / "data.tar"
    if not path.exists():
        with tarfile.open(path, "w") as archive:
            for index, (image, number) in enumerate(zip(IMAGES, CLASSES, strict=True)):
                array = io.BytesIO()
                np.save(array, image)
                for name, data in (("npy", array.getvalue()), ("cls", str(number).encode())):
                    entry = tarfile.TarInfo(f"{index:04}.{name}")
                    entry.size = len(data)
                    archive.addfile(entry, io.BytesIO(data))
    shuffle = webdataset.shuffle(32) if seed is None else webdataset.detshuffle(32, seed=seed)
    pipeline = webdataset.DataPipeline(
        webdataset.SimpleShardList([str(path)] * max(1, workers)),
        webdataset.split_by_worker,
        webdataset.tarfile_to_samples(),
        shuffle,
        webdataset.decode(),
        webdataset.to_tuple("npy", "cls"),
    )
    return loader(pipeline, batch_size=BATCH, num_workers=workers)


def chunked(_, workers, folder):
    """Read litData's chunks by its own loader."""
    path = folder / "chunks"
    if not path.exists():
        writer = BinaryWriter(str(path), chunk_size=24)
        for index in range(SAMPLES):
            writer[index] = {"x": torch.tensor(IMAGES[index]), "y": int(CLASSES[index])}
        writer.done()
        writer.merge(1)
    data = litdata.StreamingDataset(str(path), shuffle=True, seed=3)
    return litdata.StreamingDataLoader(data, batch_size=BATCH, num_workers=workers)


LOADERS: dict[str, Callable[..., Any]] = {
    "datasets, map-style": partial(mapped, DataLoader),
    "datasets, map-style, StatefulDataLoader": partial(mapped, StatefulDataLoader),
    "datasets, iterable": partial(streamed, DataLoader),
    "datasets, iterable, StatefulDataLoader": partial(streamed, StatefulDataLoader),
    "datasets, iterable, unseeded": partial(streamed, DataLoader, seed=None),
    "webdataset, detshuffle": partial(tarred, DataLoader),
    "webdataset, detshuffle, StatefulDataLoader": partial(tarred, StatefulDataLoader),
    "webdataset, shuffle": partial(tarred, DataLoader, seed=None),
    "litdata": partial(chunked, None),
}


def fit(loader, folder, *, reference=None, checkpoint=None, callback=None):
    """Train, compare with a reference; return the ledger's folder."""
    session._fits = 0  # noqa: SLF001 - as the first fit of a process
    torch.manual_seed(7)
    control = DeterminismCallback(seed=5, ledger_dir=folder, reference=reference)
    trainer = L.Trainer(
        max_epochs=3,
        callbacks=[control, *([callback] if callback else [])],
        enable_checkpointing=callback is not None,
        **QUIET,
    )
    trainer.fit(Net(), loader, ckpt_path=checkpoint)
    return control.ledger


def attempt(*arguments, **words):
    """Return ``exact``, or the type and the text of the error of a fit."""
    try:
        fit(*arguments, **words)
    except D9mError as error:
        return f"{type(error).__name__}: {error}"
    return "exact"


def measure(make, folder, workers):
    """Return what repeating and resuming gave."""
    new = partial(make, workers, folder)
    reference = fit(new(), folder / "first")
    found = {"repeated": attempt(new(), folder / "second", reference=reference)}
    for number, name, words in (
        (0, "within an epoch", {"every_n_train_steps": 2, "save_top_k": -1}),
        (1, "after an epoch", {"every_n_epochs": 1, "save_top_k": -1}),
    ):
        place = folder / name
        saver = ModelCheckpoint(place, filename="{step}", save_on_train_epoch_end=None, **words)
        attempt(new(), folder / f"{name} saved", callback=saver)
        saved = sorted(place.glob("*.ckpt"), key=lambda path: int(path.stem.partition("=")[2]))
        found[f"resumed {name}"] = attempt(
            new(), folder / f"{name} resumed", reference=reference, checkpoint=saved[number]
        )
    return found


def main():
    """Measure every loader; write the results."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    results: dict[str, Any] = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "versions": {name: importlib.metadata.version(name) for name in LIBRARIES},
        "loaders": {},
    }
    for name, make in LOADERS.items():
        for workers in (0, 2):
            with tempfile.TemporaryDirectory() as folder:
                found = measure(make, Path(folder), workers)
            results["loaders"][f"{name}, {workers} workers"] = found
            print(f"{name}, {workers} workers")
            for place, outcome in found.items():
                print(f"  {place}: {outcome[:150]}")
    RESULT.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
