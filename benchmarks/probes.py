"""What probes cost a training step, and what they take on disk.

Within one fit, blocks of steps with the callback alternate with blocks without it: the same model,
the same caches, the same minute. The ratio of two neighbouring blocks is formed from the medians of
their steps, without the first; given are the median and the quartiles of these ratios. A step lasts
from the end of the one before to its own. What the callback does to a fit as a whole (seeds, flags,
loaders, the digests of an epoch) is in both kinds of blocks: benchmarks/callback.py measures it.

    python benchmarks/probes.py [--rounds 8] [--kinds Digits] [--variants "module probes"] [-o FILE]
"""

import argparse
import json
import statistics
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_d9m import DeterminismCallback
from lightning_d9m.evidence.stack import capture_stack

MODULES = ["input", "output", "grad_output"]
VARIANTS = {
    "epoch digests": {},
    "step digests of weights and loss": {"probes": ["weight", "loss"]},
    "module probes": {"probes": MODULES},
    "op level": {"probes": ["op"]},
    "everything": {"probes": "all"},
}


class Digits(pl.LightningModule):
    """A small convolutional net on 8 x 8 images, batch 64."""

    steps = 400
    block = 10
    batch_size = 64

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

    steps = 120
    block = 3
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


KINDS = {"Digits": Digits, "Transformer": Transformer}


class Switch(pl.Callback):
    """Times steps, and takes a callback out of the Trainer for every other block of them.

    Blocks come in the order on, off, off, on, so that what drifts meets both alike.
    """

    def __init__(self, own: DeterminismCallback, block: int) -> None:
        self.own = own
        self.block = block
        self.blocks: list[list[float]] = [[]]
        self.ended = 0.0

    def is_on(self) -> bool:
        """Return whether the block under way is one with the callback."""
        return len(self.blocks) % 4 in (0, 1)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: object) -> None:
        """Time a step; after the last of a block, switch."""
        self.blocks[-1].append(time.perf_counter() - self.ended)
        if len(self.blocks[-1]) == self.block:
            self.blocks.append([])
            # A new list, because Lightning is iterating over the other.
            trainer.callbacks = [self.own, self] if self.is_on() else [self]
            if not self.is_on():
                self.own._probing._unhook()  # noqa: SLF001 - what a batch that is not probed does
        self.ended = time.perf_counter()

    def on_train_epoch_end(self, trainer: pl.Trainer, *_: object) -> None:
        """Let the callback end the fit that it began."""
        trainer.callbacks = [self.own, self]

    def ratios(self) -> Iterator[tuple[float, float]]:
        """Yield (ratio, seconds without) for each two neighbours; the first two warm up."""
        whole = [own for own in self.blocks if len(own) == self.block]
        medians = [statistics.median(own[1:]) for own in whole]
        for number in range(2, len(medians) - 1, 2):  # off, on; on, off
            pair = medians[number : number + 2]
            on, off = pair if number % 4 == 0 else pair[::-1]
            yield on / off, off


def train(kind: type[Digits], words: dict, folder: Path) -> tuple[list, Path]:
    """Train one epoch; return the ratios and the rank's file."""
    torch.manual_seed(0)
    own = DeterminismCallback(ledger_dir=folder, **words)
    switch = Switch(own, kind.block)
    trainer = pl.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[own, switch],
        deterministic=True,
    )
    trainer.fit(kind(), DataLoader(kind.data(), batch_size=kind.batch_size))
    (file,) = folder.glob("fit-*/rank-0.jsonl")
    return list(switch.ratios()), file


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


def measure(kind: type[Digits], variants: Sequence[str], rounds: int) -> Iterator[tuple[str, dict]]:
    """Yield for each variant the ratio over steps without the callback."""
    for name in variants:
        words = VARIANTS[name]
        found: list[tuple[float, float]] = []
        for _ in range(rounds):
            with tempfile.TemporaryDirectory() as folder:
                ratios, file = train(kind, words, Path(folder))
                found += ratios
                size = measure_file(file)
        low, middle, high = statistics.quantiles([ratio for ratio, _ in found], n=4)
        yield (
            name,
            {
                "pairs": len(found),
                "step_without_s": statistics.median(off for _, off in found),
                "ratio": middle,
                "ratio_quartiles": [low, high],
                **size,
            },
        )


def main() -> None:
    """Measure both models and print, or write, the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=1, help="fits of each variant")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=[*KINDS])
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=[*VARIANTS])
    parser.add_argument("-o", "--output", type=Path)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    results = {"stack": capture_stack({})}
    if arguments.output and arguments.output.exists():  # what is measured now, beside the rest
        results = json.loads(arguments.output.read_text()) | results
    for kind in arguments.kinds:
        for name, row in measure(KINDS[kind], arguments.variants, arguments.rounds):
            results.setdefault(kind, {})[name] = row
            low, high = row["ratio_quartiles"]
            print(
                f"{kind:12} {name:34} {row['step_without_s'] * 1e3:8.2f} ms  x{row['ratio']:.3f}"
                f"  [{low:.3f}, {high:.3f}]  {row['bytes_per_place']:.1f} B/place",
                flush=True,
            )
            if arguments.output:  # after each: what was measured is kept
                arguments.output.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
