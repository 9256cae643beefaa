"""Rows of the parts "scans" and "steps"."""

import tempfile
import time
import warnings
from functools import partial
from itertools import pairwise

import lightning.pytorch as pl
import torch
from probe_models import KINDS
from suite_client import Row
from suite_measures import Settings, count_outputs, patched
from torch.utils.data import DataLoader

from lightning_d9m import DeterminismCallback

SCANS = {
    "cumprod": lambda row: row.mul(1e-3).add(1).cumprod(1),
    "logcumsumexp": lambda row: row.logcumsumexp(1),
}
BATCHES = (4, 8)
WAIT = "called a synchronizing CUDA operation"  # torch's warning of its sync debug mode


def run_scan(name: str, settings: Settings) -> Row:
    """Count the outputs of ten times as many calls on one row, beside other work."""
    size = 2**22 if settings.device == "cuda" else 2**12
    generator = torch.Generator().manual_seed(0)
    row = torch.randn(1, size, generator=generator).to(settings.device)
    many = Settings(settings.device, "1", str(10 * settings.calls), "")
    call = partial(SCANS[name], row)
    found: Row = {"calls": many.calls, "original_outputs": count_outputs(call, many)}
    with patched(settings):
        found["patched_outputs"] = count_outputs(call, many)
    if found["patched_outputs"] != 1:
        found["error"] = f"{found['patched_outputs']} outputs for one input"
    return found


class Clock(pl.Callback):
    """Takes the times at which batches, the validation and what follows begin and end."""

    def __init__(self, device: str) -> None:
        self._device = device
        self.moments: list[float] = []

    def note(self, *_: object) -> None:
        """Note the time when the device has ended its work."""
        if self._device == "cuda":
            torch.cuda.synchronize()
        self.moments.append(time.perf_counter())

    on_train_epoch_start = on_validation_start = on_validation_end = note


def fit(name: str, batches: int, device: str, *, callback: bool) -> tuple[Row, int]:
    """Train and validate; return milliseconds, and the number of waits that torch has seen."""
    kind = type(
        name, (KINDS[name],), {"validation_step": lambda own, batch, _: own.layers(batch[0])}
    )
    loader = DataLoader(kind.data(), batch_size=kind.batch_size)
    clock = Clock(device)
    settings = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    settings |= {"limit_train_batches": batches, "limit_val_batches": batches}
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        own = [DeterminismCallback(seed=0, ledger_dir=folder)] if callback else []
        trainer = pl.Trainer(
            accelerator="gpu" if device == "cuda" else "cpu", devices=1, max_epochs=1,
            callbacks=[clock, *own], num_sanity_val_steps=0, enable_model_summary=False, **settings,
        )  # fmt: skip
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("warn")
        try:
            trainer.fit(kind(), loader, loader)
            clock.note()
        finally:
            if device == "cuda":
                torch.cuda.set_sync_debug_mode("default")
    step, validation, end = (1e3 * (b - a) for a, b in pairwise(clock.moments))
    times = {"step_ms": step / batches, "validation_batch_ms": validation / batches}
    return times | {"epoch_end_ms": end}, sum(WAIT in str(one.message) for one in caught)


def run_steps(name: str, settings: Settings) -> Row:
    """Measure a model with and without the callback, and the waits that it adds to each batch."""
    fit(name, 1, settings.device, callback=True)  # warm up
    row: Row = {}
    added = {}
    for label, callback in (("plain", False), ("callback", True)):
        counts = []
        for batches in BATCHES:
            row[label], count = fit(name, batches, settings.device, callback=callback)
            counts.append(count)
        row[label]["waits"] = counts
        added[label] = counts[1] - counts[0]
    row["step_ratio"] = row["callback"]["step_ms"] / row["plain"]["step_ms"]
    if added["callback"] > added["plain"]:
        row["error"] = f"the callback waits in batches: {added}"
    return row
