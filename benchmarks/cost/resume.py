"""Cost of exact resume: saving the state, checking the steps after it, seeding each batch.

    python benchmarks/cost/resume.py [--only PART ...]    such as --only saving

Saving is measured with one rank, and with two and four of DDP on Gloo, which gather their states.
Medians of several repeats on the CPU. Results go to ``benchmarks/results/resume-cpu.json``, where
other parts are kept; the status is 1 when one of them is over its limit.
"""

import argparse
import logging
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_d9m import DeterminismCallback
from lightning_d9m.engine.control.data.loaders import LoaderControl, SeededDataset, return_batch
from lightning_d9m.engine.control.data.resumable_sampler import SeededIndex
from lightning_d9m.engine.control.seeding import RandomStreams
from lightning_d9m.engine.recording.run import Run

sys.path.insert(0, str(Path(__file__).parents[1]))
from measurement import (
    QUIET,
    RESULTS,
    describe_machine,
    keep,
    median_seconds,
    run_ranks,
    write_rank,
)

SAMPLES, BATCH = 10_000_000, 256
SAVING = ("saving", "saving, 2 ranks", "saving, 4 ranks")
# The most that each may be.
LIMITS = {
    ("position", "seconds_to_first_batch_after_skip"): 6.0,
    ("position", "samples_loaded"): BATCH,
    **{(part, "milliseconds_per_rank"): 10.0 for part in SAVING},
    **{(part, "bytes_per_rank"): 100 * 1024 for part in SAVING},
    ("seeding", "microseconds_per_sample"): 50.0,
    ("check", "percent_of_100_steps"): 1.0,
}


class Counted(Dataset[Tensor]):
    """Samples that cost nothing, and are counted when they are loaded."""

    def __init__(self) -> None:
        self.loaded = 0
        self.sample = torch.zeros(4)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        self.loaded += 1
        return self.sample


def measure_position() -> dict[str, float]:
    """Measure the time to the first batch of a shuffled epoch: at its begin, and near its end.

    What is loaded is that batch, and nothing of what was consumed.
    """
    # Not at the very end, where torch shuffles once more.
    consumed = SAMPLES // BATCH - 20

    def first_batch(skip: int) -> int:
        dataset = Counted()
        loader = DataLoader(dataset, batch_size=BATCH, shuffle=True)
        control = LoaderControl(1, fit=0, rank=0, per_sample_rng=False)
        control.wrap_loader(loader, "train")
        control.resume_epoch("train", 0, batches=skip, cycled=bool)
        control.start_epoch("train", 0)
        next(iter(loader))
        control.release()
        return dataset.loaded

    return {
        "seconds_to_first_batch_from_start": median_seconds(lambda: first_batch(0), 5),
        "seconds_to_first_batch_after_skip": median_seconds(lambda: first_batch(consumed), 5),
        "samples_loaded": first_batch(consumed),
    }


class Perceptron(L.LightningModule):
    """A multilayer perceptron of about 100,000 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))

    def training_step(self, batch: Tensor, _: int) -> Tensor:
        """Return a loss."""
        return self.layers(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Use AdamW."""
        return torch.optim.AdamW(self.parameters())


def fit(observer: L.Callback, ranks: int, samples: int) -> None:
    """Train one epoch with the callback and an observer."""
    strategy = "ddp" if ranks > 1 else "auto"
    callbacks = [DeterminismCallback(seed=1), observer]
    with tempfile.TemporaryDirectory() as folder:
        trainer = L.Trainer(
            max_epochs=1, devices=ranks, strategy=strategy, callbacks=callbacks,
            default_root_dir=folder, **QUIET,
        )  # fmt: skip
        trainer.fit(Perceptron(), DataLoader(torch.randn(samples * ranks, 256), 32))


class Saving(L.Callback):
    """Times our hook that adds the state, in the middle of an epoch."""

    def on_train_batch_end(self, trainer, pl_module, _outputs, _batch, batch_idx):
        """Save at the fifth batch."""
        if batch_idx != 4:
            return
        (callback,) = (c for c in trainer.callbacks if isinstance(c, DeterminismCallback))
        checkpoint: dict[str, object] = {}
        save = partial(callback.on_save_checkpoint, trainer, pl_module, checkpoint)
        self.milliseconds = 1e3 * median_seconds(save, 50)
        with tempfile.TemporaryFile() as file:
            torch.save(checkpoint["callbacks"]["lightning_d9m"]["ranks"][0], file)
            self.bytes = file.tell()


def measure_saving(ranks: int = 1) -> dict[str, float]:
    """Measure the time and the size of one rank's state; every rank calls it."""
    saving = Saving()
    fit(saving, ranks, 320)
    return {"milliseconds_per_rank": saving.milliseconds, "bytes_per_rank": saving.bytes}


def measure_saving_together(ranks: int) -> dict[str, float]:
    """Measure the slowest of several ranks, each of which is a process."""
    found = run_ranks(ranks, __file__, "--rank-of", ranks)
    return {name: max(one[name] for one in found) for name in found[0]}


class Intervals(L.Callback):
    """Times batches, and saves after every 100th."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_train_batch_end(self, trainer, _module, _outputs, _batch, batch_idx):
        """Note the time."""
        self.times.append(time.perf_counter())
        if batch_idx % 100 == 50:
            trainer._checkpoint_connector.dump_checkpoint()  # noqa: SLF001 - without a file


def measure_check() -> dict[str, float]:
    """Measure what the digests of three steps after a checkpoint cost in a fit of 400 batches."""
    spent: list[float] = []
    original = Run.end_step

    def timed(run: Run, epoch: int, step: int) -> None:
        is_due, start = run._due > 0, time.perf_counter()  # noqa: SLF001 - what is measured
        original(run, epoch, step)
        if is_due:
            spent.append(time.perf_counter() - start)

    intervals = Intervals()
    Run.end_step = timed  # type: ignore[method-assign]
    try:
        fit(intervals, 1, 12800)
    finally:
        Run.end_step = original  # type: ignore[method-assign]
    step = statistics.median(b - a for a, b in pairwise(intervals.times))
    digests = statistics.median(spent)
    return {
        "milliseconds_per_step": 1e3 * step,
        "milliseconds_per_digest": 1e3 * digests,
        "percent_of_100_steps": 3 * digests / step,
    }


def measure_seeding() -> dict[str, float]:
    """Measure what seeding adds to a batch and to a sample, where they are loaded."""
    found = {}
    indices, plain = list(range(BATCH)), Counted()
    for name, per_sample in (("batch", False), ("sample", True)):
        stream = RandomStreams(1, 0, 0, "train")
        seeded = SeededDataset(Counted(), stream, per_sample, return_batch)
        index = SeededIndex(indices, 12345, 0)
        with_seed = median_seconds(lambda seeded=seeded, i=index: seeded.__getitems__(i), 50)
        without = median_seconds(lambda: [plain[i] for i in indices], 50)
        found[f"microseconds_per_{name}"] = (
            1e6 * (with_seed - without) / (BATCH if per_sample else 1)
        )
    return found


PARTS: dict[str, Callable[[], dict[str, float]]] = {
    "check": measure_check,
    "position": measure_position,
    "saving": measure_saving,
    "saving, 2 ranks": lambda: measure_saving_together(2),
    "saving, 4 ranks": lambda: measure_saving_together(4),
    "seeding": measure_seeding,
}


def main() -> int:
    """Measure, print and write; return the exit status."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", default=[""], help="the beginnings of names of parts")
    parser.add_argument("--rank-of", nargs=2, help=argparse.SUPPRESS)
    words = parser.parse_args()
    if words.rank_of:
        ranks, folder = words.rank_of
        write_rank(folder, measure_saving(int(ranks)))
        return 0
    found = {part: PARTS[part]() for part in PARTS if part.startswith(tuple(words.only))}
    excess = [
        f"{part}: {name} is {found[part][name]}, over {limit}"
        for (part, name), limit in LIMITS.items()
        if part in found and found[part][name] > limit
    ]
    record = {"machine": describe_machine(), "results": found, "over_limit": excess}
    keep(RESULTS / "resume-cpu.json", record)
    return 1 if excess else 0


if __name__ == "__main__":
    sys.exit(main())
