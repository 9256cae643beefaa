"""What probes cost a training step, and what they take on disk.

Each variant trains the same batches in one process, in rounds that alternate between the variants;
the time of a step is taken from `on_train_batch_start` of a first callback to `on_train_batch_end`
of a last one. Usage: python benchmarks/probes.py [--rounds 7] [-o FILE]
"""

import argparse
import json
import statistics
import tempfile
import time
import warnings
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_d9m import DeterminismCallback
from lightning_d9m.evidence.stack import capture_stack

MODULES = ["input", "output", "grad_output"]
VARIANTS = {
    "none": None,
    "epoch digests": {},
    "step digests of weights and loss": {"probes": ["weight", "loss"]},
    "module probes": {"probes": MODULES},
    "op level": {"probes": ["op"]},
    "everything": {"probes": "all"},
}


class Digits(pl.LightningModule):
    """A small convolutional net on 8 x 8 images, batch 64."""

    steps = 60

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(),
            nn.Flatten(), nn.Linear(64 * 64, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10),
        )  # fmt: skip

    @staticmethod
    def data() -> TensorDataset:
        """Return the samples of an epoch."""
        generator = torch.Generator().manual_seed(0)
        images = torch.rand(64 * Digits.steps, 1, 8, 8, generator=generator)
        return TensorDataset(images, torch.randint(10, (len(images),), generator=generator))

    def training_step(self, batch, _):
        """Return the loss."""
        loss = nn.functional.cross_entropy(self.layers(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        """Return the optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Transformer(Digits):
    """An encoder of 10.5 million parameters, 8 sequences of 128 tokens."""

    steps = 4
    batch_size = 8

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(384, 6, 1536, batch_first=True, dropout=0.1)
        self.layers = nn.Sequential(
            nn.Embedding(2048, 384),
            nn.TransformerEncoder(layer, 5, enable_nested_tensor=False),
            nn.Linear(384, 2048),
        )

    @staticmethod
    def data() -> TensorDataset:
        """Return the samples of an epoch."""
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(2048, (8 * Transformer.steps, 128), generator=generator)
        return TensorDataset(tokens, tokens.roll(1, 1))

    def training_step(self, batch, _):
        """Return the loss."""
        logits = self.layers(batch[0])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[1].flatten())
        self.log("train_loss", loss)
        return loss


class Clock(pl.Callback):
    """Times steps, from the first callback's start of a batch."""

    def __init__(self) -> None:
        self.begun = 0.0
        self.times: list[float] = []

    def on_train_batch_start(self, *_: object) -> None:
        """Start."""
        self.begun = time.perf_counter()


class Stop(pl.Callback):
    """Stops a clock, at the last callback's end of a batch."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def on_train_batch_end(self, *_: object) -> None:
        """Stop."""
        self.clock.times.append(time.perf_counter() - self.clock.begun)


def train(kind: type[Digits], words: dict | None, folder: Path) -> tuple[list[float], Path | None]:
    """Train one epoch; return the seconds of each step but the first, and the rank's file."""
    torch.manual_seed(0)
    model = kind()
    clock = Clock()
    own = [] if words is None else [DeterminismCallback(ledger_dir=folder, **words)]
    trainer = pl.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[clock, *own, Stop(clock)],
        deterministic=True,
    )
    batch_size = getattr(kind, "batch_size", 64)
    trainer.fit(model, DataLoader(kind.data(), batch_size=batch_size))
    files = sorted(folder.glob("fit-*/rank-0.jsonl"))
    return clock.times[1:], files[-1] if own else None


def measure_file(file: Path) -> dict[str, float]:
    """Return how many places a file records and how many bytes each takes."""
    places = size = layouts = 0
    for line in file.read_bytes().splitlines(keepends=True):
        record = json.loads(line)
        if record["kind"] == "probes":
            places += len(record["digests"]) // 32
            size += len(line)
        elif record["kind"] == "layout":
            layouts += len(line)
    return {
        "places": places,
        "bytes_per_place": size / max(places, 1),
        "bytes_per_place_with_layouts": (size + layouts) / max(places, 1),
    }


def measure(kind: type[Digits], rounds: int) -> dict:
    """Alternate between the variants; return the seconds of a step and ratios over none."""
    medians: dict[str, list[float]] = {name: [] for name in VARIANTS}
    files: dict[str, dict[str, float]] = {}
    for number in range(rounds + 1):
        for name, words in VARIANTS.items():
            with tempfile.TemporaryDirectory() as folder:
                times, file = train(kind, words, Path(folder))
                if number:  # the first round warms up
                    medians[name].append(statistics.median(times))
                if file is not None:
                    files[name] = measure_file(file)
    result = {}
    for name, own in medians.items():
        ratios = [a / b for a, b in zip(own, medians["none"], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        result[name] = {
            "step_s": statistics.median(own),
            "ratio": middle,
            "ratio_quartiles": [low, high],
            **files.get(name, {}),
        }
    return result


def main() -> None:
    """Measure both models and print, or write, the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="two or more")
    parser.add_argument("-o", "--output", type=Path)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    results = {"stack": capture_stack({}), "rounds": arguments.rounds}
    for kind in (Digits, Transformer):
        results[kind.__name__] = own = measure(kind, arguments.rounds)
        for name, row in own.items():
            low, high = row["ratio_quartiles"]
            print(
                f"{kind.__name__:12} {name:34} {row['step_s'] * 1e3:8.2f} ms  x{row['ratio']:.3f}"
                f"  [{low:.3f}, {high:.3f}]  {row.get('bytes_per_place', 0):.1f} B/place",
                flush=True,
            )
        if arguments.output:  # after each model: what was measured is kept
            arguments.output.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
