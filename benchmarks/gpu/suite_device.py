"""Rows of the parts "scans", "steps" and "sizes": what a real device or large tensors can show."""

import tempfile
import time
import warnings
from functools import partial
from itertools import pairwise

import lightning.pytorch as pl
import torch
import torch.nn.functional as nnf
from probe_models import KINDS
from suite_journal import Row
from suite_measures import Settings, count_outputs, measure, patched
from torch.utils.data import DataLoader

from lightning_d9m import DeterminismCallback
from lightning_d9m.engine.hashing.digest import digest, digest_many
from lightning_d9m.engine.ledger.stack import capture_stack
from lightning_d9m.ops.patches.registration import patches_applied

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


def add_many(settings: Settings) -> Row:
    """Add 1,945,600,000 terms into 307,200,000 places, as a graph network does."""
    nodes, edges = (2_400_000, 15_200_000) if settings.device == "cuda" else (24, 152)
    target = torch.zeros(nodes, 128, device=settings.device)
    index = torch.arange(edges, device=settings.device) % nodes
    with patches_applied(settings.device.upper()):  # the flag is off, so the sums are exact ones
        target.index_add_(0, index, torch.ones((), device=settings.device).expand(edges, 128))
    expected = torch.bincount(index, minlength=nodes)
    wrong = int((target != expected[:, None]).sum())
    return {"terms": edges * 128, **({"error": f"{wrong:,} wrong sums"} if wrong else {})}


def use_default_device(settings: Settings) -> Row:
    """Digest, and train with a checkpoint, under torch.set_default_device."""
    kind = KINDS["Digits"]
    loader = DataLoader(kind.data(), batch_size=kind.batch_size)
    values = torch.arange(9.0).to(settings.device)
    torch.set_default_device(settings.device)
    try:
        digest(values)
        with tempfile.TemporaryDirectory() as folder:
            trainer = pl.Trainer(
                accelerator="gpu" if settings.device == "cuda" else "cpu", devices=1, max_epochs=1,
                limit_train_batches=2, logger=False, default_root_dir=folder,
                enable_progress_bar=False, enable_model_summary=False,
                callbacks=[DeterminismCallback(seed=0, ledger_dir=folder)],
            )  # fmt: skip
            trainer.fit(kind(), loader)
    finally:
        torch.set_default_device(None)
    return {"steps": trainer.global_step}


def digest_channels_last(settings: Settings) -> Row:
    """Digest 201 MB of channels-last weights; the new memory at the peak is bounded."""
    side = 512 if settings.device == "cuda" else 8
    weights = [
        torch.randn(side, side, 4, 4, device=settings.device).to(memory_format=torch.channels_last)
        for _ in range(12)
    ]
    if settings.device == "cpu":
        return {"digests": len(digest_many(weights))}
    digest_many(weights[:1])
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    digest_many(weights)
    peak = (torch.cuda.max_memory_allocated() - before) / 1e6
    return {"peak_mb": peak, **({"error": f"{peak:.0f} MB of new memory"} if peak > 80 else {})}


def name_device(settings: Settings) -> Row:
    """Compare the device of the stack with that of torch."""
    found = capture_stack().get("device.name")
    expected = torch.cuda.get_device_name() if settings.device == "cuda" else None
    return {"name": found, **({"error": f"not {expected}"} if found != expected else {})}


def count_launches(settings: Settings) -> Row:
    """Count the kernels of the gradient of grid_sample, torch's own among them."""
    row: Row = {}
    for mode, dims in (("bilinear", 2), ("bilinear", 3), ("bicubic", 2)):
        with patched(settings):
            image = torch.randn(2, 3, *[8] * dims, device=settings.device, requires_grad=True)
            grid = torch.rand(2, *[9] * dims, dims, device=settings.device, requires_grad=True)
            output = nnf.grid_sample(image, grid, mode, align_corners=False)
            torch.autograd.grad(output.sum(), (image, grid), retain_graph=True)
            with torch.profiler.profile() as profile:
                torch.autograd.grad(output.sum(), (image, grid))
        kernels = [one for one in profile.events() if "CUDA" in str(one.device_type)]
        row[f"{mode}{dims}d"] = len(kernels)
    return row


def scan_row(settings: Settings) -> Row:
    """Measure the scans of one long row beside torch's own."""
    row = torch.rand(2**22 if settings.device == "cuda" else 2**10, device=settings.device)
    found: Row = {}
    for scan in (torch.cumprod, torch.logcumsumexp):
        found[f"{scan.__name__} original"] = measure(lambda scan=scan: scan(row, 0), settings)
        with patched(settings):
            found[f"{scan.__name__} patched"] = measure(lambda scan=scan: scan(row, 0), settings)
    return found


LARGE = {
    "index_add of 2.25e9 elements": add_many,
    "a default device": use_default_device,
    "digests of channels-last weights": digest_channels_last,
    "the device of the stack": name_device,
    "kernels of grid_sample": count_launches,
    "scans of one row": scan_row,
}


def run_size(name: str, settings: Settings) -> Row:
    """Run one of the items."""
    return LARGE[name](settings)
