"""Cost of exact resume: finding the place in an epoch, saving the state, seeding each batch.

    python benchmarks/resume.py [--only PART ...]    such as --only saving, which takes a minute

Saving is measured with one rank, and with two and four of DDP on Gloo, which gather their states.
Medians of several repeats, on the CPU, in seconds, milliseconds or microseconds as named. Results
go to ``benchmarks/results/resume-cpu.json``, where other parts are kept; the status is 1 when one
of them is over its limit.
"""

import argparse
import json
import logging
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from datetime import datetime, timezone
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

RESULTS = Path(__file__).parents[1] / "results"
SAMPLES = 10_000_000
BATCH = 256
# What each may be at most.
LIMITS = {
    ("position, shuffled", "seconds_to_first_batch_after_skip"): 6.0,
    ("position, shuffled", "samples_loaded"): BATCH,
    ("position, in order", "seconds_to_first_batch_after_skip"): 6.0,
    ("position, in order", "samples_loaded"): BATCH,
    ("position, shuffled, 2 workers", "seconds_to_first_batch_after_skip"): 6.0,
    **{
        (part, name): limit
        for part in ("saving", "saving, 2 ranks", "saving, 4 ranks")
        for name, limit in (("milliseconds_per_rank", 10.0), ("bytes_per_rank", 100 * 1024))
    },
    ("seeding in a worker", "microseconds_per_sample"): 50.0,
    ("check", "percent_of_100_steps"): 1.0,
}


class Counted(Dataset[Tensor]):
    """Samples that cost nothing, and are counted when they are loaded."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.loaded = 0
        self.sample = torch.zeros(4)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Tensor:
        self.loaded += 1
        return self.sample


def median_seconds(func: Callable[[], object], repeats: int) -> float:
    """Return the median time of an action, after one that is not timed."""
    func()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        func()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def measure_position(*, shuffle: bool, workers: int = 0) -> dict[str, float]:
    """Measure the time to the first batch of an epoch: at its begin, and near its end.

    What is loaded is that batch, and nothing of what was consumed; workers, who load in processes
    of their own, are not counted.
    """
    # Not at the very end: there torch shuffles once more, and workers are given batches ahead.
    consumed = SAMPLES // BATCH - 20

    def first_batch(skip: int) -> int:
        dataset = Counted(SAMPLES)
        loader = DataLoader(dataset, batch_size=BATCH, shuffle=shuffle, num_workers=workers)
        control = LoaderControl(1, fit=0, rank=0, per_sample_rng=False)
        control.wrap_loader(loader, "train")
        control.resume_epoch("train", 0, batches=skip, cycled=bool)
        control.start_epoch("train", 0)
        next(iter(loader))
        control.release()
        return dataset.loaded

    straight = median_seconds(lambda: first_batch(0), 5)
    resumed = median_seconds(lambda: first_batch(consumed), 5)
    found = {
        "seconds_to_first_batch_from_start": straight,
        "seconds_to_first_batch_after_skip": resumed,
        "samples_skipped": consumed * BATCH,
    }
    return found if workers else {**found, "samples_loaded": first_batch(consumed)}


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


class Saving(L.Callback):
    """Times our hook that adds the state, in the middle of an epoch."""

    def __init__(self) -> None:
        self.milliseconds = 0.0
        self.bytes = 0

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: object,  # noqa: ARG002 - the hook's signature
        batch: object,  # noqa: ARG002
        batch_idx: int,
    ) -> None:
        """Save at the fifth batch."""
        if batch_idx != 4:
            return
        (callback,) = (c for c in trainer.callbacks if isinstance(c, DeterminismCallback))
        checkpoint: dict[str, object] = {}
        func = lambda: callback.on_save_checkpoint(trainer, pl_module, checkpoint)  # noqa: E731
        self.milliseconds = 1e3 * median_seconds(func, 50)
        with tempfile.TemporaryDirectory() as folder:
            torch.save(
                checkpoint["callbacks"]["lightning_d9m"]["ranks"][0], Path(folder, "state.pt")
            )
            self.bytes = Path(folder, "state.pt").stat().st_size


def measure_saving(ranks: int = 1) -> dict[str, float]:
    """Measure the time and the size of one rank's state; every rank calls it."""
    saving = Saving()
    with tempfile.TemporaryDirectory() as folder:
        trainer = L.Trainer(
            max_epochs=1,
            accelerator="cpu",
            devices=ranks,
            strategy="ddp" if ranks > 1 else "auto",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
            callbacks=[DeterminismCallback(seed=1), saving],
        )
        trainer.fit(Perceptron(), DataLoader(torch.randn(320 * ranks, 256), 32))
    return {"milliseconds_per_rank": saving.milliseconds, "bytes_per_rank": saving.bytes}


class Intervals(L.Callback):
    """Times batches, and saves after every 100th."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,  # noqa: ARG002 - the hook's signature
        outputs: object,  # noqa: ARG002
        batch: object,  # noqa: ARG002
        batch_idx: int,
    ) -> None:
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
        with tempfile.TemporaryDirectory() as folder:
            trainer = L.Trainer(
                max_epochs=1,
                accelerator="cpu",
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                default_root_dir=folder,
                callbacks=[DeterminismCallback(seed=1), intervals],
            )
            trainer.fit(Perceptron(), DataLoader(torch.randn(12800, 256), 32))
    finally:
        Run.end_step = original  # type: ignore[method-assign]
    times = intervals.times
    step = statistics.median(b - a for a, b in pairwise(times))
    digests = statistics.median(spent)
    return {
        "milliseconds_per_step": 1e3 * step,
        "milliseconds_per_digest": 1e3 * digests,
        "percent_of_100_steps": 3 * digests / step,
    }


def measure_saving_together(ranks: int) -> dict[str, float]:
    """Measure the slowest of several ranks, each of which is a process."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    shared |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "GROUP_RANK": "0"}
    shared |= {"TORCHELASTIC_RUN_ID": "resume"}
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, "--rank-of", str(ranks)],
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for rank in range(ranks)
    ]
    found = [json.loads(process.communicate()[0].splitlines()[-1]) for process in processes]
    return {name: max(one[name] for one in found) for name in found[0]}


def measure_seeding() -> dict[str, float]:
    """Measure what seeding adds to a batch and to a sample, where they are loaded."""
    found = {}
    indices = list(range(BATCH))
    for name, per_sample in (("batch", False), ("sample", True)):
        stream = RandomStreams(1, 0, 0, "train")
        seeded = SeededDataset(Counted(SAMPLES), stream, per_sample, return_batch)
        plain = Counted(SAMPLES)

        def fetch(seeded: SeededDataset = seeded) -> None:
            seeded.__getitems__(SeededIndex(indices, 12345, 0))

        with_seed = median_seconds(fetch, 50)
        without = median_seconds(lambda plain=plain: [plain[i] for i in indices], 50)
        units = BATCH if per_sample else 1
        found[f"microseconds_per_{name}"] = 1e6 * (with_seed - without) / units
    return found


class Measured(Dataset[dict[str, float]]):
    """Its sample is what seeding costs in the process that loads it."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> dict[str, float]:
        return measure_seeding()


def measure_seeding_in_a_worker() -> dict[str, float]:
    """Measure what seeding adds in a loader's worker."""
    (found,) = DataLoader(Measured(), batch_size=None, num_workers=1)
    return {name: float(value) for name, value in found.items()}


def find_excess(results: dict[str, dict[str, float]]) -> list[str]:
    """Return what is over its limit."""
    return [
        f"{part}: {name} is {results[part][name]}, over {limit}"
        for (part, name), limit in LIMITS.items()
        if part in results and results[part][name] > limit
    ]


PARTS: dict[str, Callable[[], dict[str, float]]] = {
    "check": measure_check,
    "position, shuffled": lambda: measure_position(shuffle=True),
    "position, shuffled, 2 workers": lambda: measure_position(shuffle=True, workers=2),
    "position, in order": lambda: measure_position(shuffle=False),
    "saving": measure_saving,
    "saving, 2 ranks": lambda: measure_saving_together(2),
    "saving, 4 ranks": lambda: measure_saving_together(4),
    "seeding in the main process": measure_seeding,
    "seeding in a worker": measure_seeding_in_a_worker,
}


def main() -> int:
    """Measure, print and write; return the exit status."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", default=[""], help="the beginnings of names of parts")
    parser.add_argument("--rank-of", type=int, help=argparse.SUPPRESS)
    words = parser.parse_args()
    if words.rank_of:
        print(json.dumps(measure_saving(words.rank_of)))
        return 0
    kept = RESULTS / "resume-cpu.json"
    results = json.loads(kept.read_text())["results"] if kept.exists() else {}
    chosen = [name for name in PARTS if name.startswith(tuple(words.only))]
    results |= {name: PARTS[name]() for name in chosen}
    excess = find_excess(results)
    report = {
        "benchmark": "resume",
        "date": datetime.now(timezone.utc).date().isoformat(),
        "torch": torch.__version__,
        "lightning": L.__version__,
        "python": platform.python_version(),
        "cpu": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "samples": SAMPLES,
        "batch_size": BATCH,
        "results": results,
        "over_limit": excess,
    }
    print(json.dumps({**report, "results": {name: results[name] for name in chosen}}, indent=2))
    kept.write_text(json.dumps(report, indent=2) + "\n")
    return 1 if excess else 0


if __name__ == "__main__":
    sys.exit(main())
