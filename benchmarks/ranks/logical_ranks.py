"""Costs of the gradients of logical ranks beside DDP: time, bytes on the wire, memory.

    python benchmarks/ranks/logical_ranks.py             everything, about 20 minutes on two cores
    python benchmarks/ranks/logical_ranks.py --rounds 3 --settings small-2-of-2

Processes on this machine, Gloo, one thread each. The processes stay; in each round they run every
way to reduce gradients for some steps. Time is that of a whole step: forward, backward, reduction,
SGD. CPU time is the sum of all processes. The memory of gradients is the peak that torch's
allocator reports for a step, less that of a forward and backward pass that drops each gradient as
soon as it is there, with the memory that the process shares with others.
Results go to ``benchmarks/results/logical-ranks-cpu.json``; other settings there are kept.
"""

import argparse
import json
import math
import os
import statistics
import sys
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_d9m.integrations.strategies.sums.gradients import LogicalGradients
from lightning_d9m.integrations.strategies.sums.malloc import disable_malloc_trim
from lightning_d9m.integrations.strategies.sums.tree import Blocks

sys.path.insert(0, str(Path(__file__).parents[1]))
from measurement import RESULTS, alternate, describe_machine, keep, ratios, run_ranks, write_rank


class Setting(NamedTuple):
    """A model on processes; each round has some steps."""

    model: str
    processes: int
    logical_ranks: int
    steps: int


SETTINGS = {
    "small-2-of-2": Setting("small", 2, 2, 30),
    "small-2-of-4": Setting("small", 2, 4, 20),
    "small-1-of-4": Setting("small", 1, 4, 30),
    "small-4-of-4": Setting("small", 4, 4, 15),
    "large-2-of-2": Setting("large", 2, 2, 4),
    "large-2-of-4": Setting("large", 2, 4, 3),
    "large-1-of-4": Setting("large", 1, 4, 4),
    "large-4-of-4": Setting("large", 4, 4, 3),
}


def make_model(name):
    """Return 150 small tensors (79,200 parameters) or 24 large ones (13 million)."""
    torch.manual_seed(0)
    layers, width = (75, 32) if name == "small" else (12, 1040)
    linear = [[nn.Linear(width, width), nn.ReLU()] for _ in range(layers)]
    return nn.Sequential(*[layer for pair in linear for layer in pair])


class Training:
    """Steps of one way to reduce gradients."""

    def __init__(self, model, blocks, process):
        self.model = make_model(model)
        width = self.model[0].in_features
        self.block = blocks.of(process)
        self.batches = [torch.randn(32, width) for _ in self.block]
        self.share = 1 / len(self.block)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-6)
        self.build(blocks, process)

    def step(self):
        """Train on the batches of each logical rank of this process."""
        self.optimizer.zero_grad()
        for rank, batch in zip(self.block, self.batches, strict=True):
            self.run_micro_batch(rank, batch)
        self.optimizer.step()


class Logical(Training):
    """The engine of logical ranks."""

    def build(self, blocks, process):
        """Make the engine."""
        self.sums = LogicalGradients(self.model.named_parameters, blocks, process)

    def run_micro_batch(self, rank, batch):
        """Run forward and backward."""
        loss = self.model(batch).square().mean()
        with self.sums.backward():
            loss.backward()
        (self.sums.finish if rank == self.block[-1] else self.sums.set_aside)(rank)


class Plain(Training):
    """DDP, which accumulates inside ``no_sync()``."""

    def build(self, _blocks, _process):
        """Make the replica."""
        self.replica = DistributedDataParallel(self.model)

    def run_micro_batch(self, rank, batch):
        """Run forward and backward."""
        with nullcontext() if rank == self.block[-1] else self.replica.no_sync():
            (self.replica(batch).square().mean() * self.share).backward()


class Dropped(Training):
    """No gradients are kept: the memory that the model itself needs."""

    def build(self, _blocks, _process):
        """Drop every gradient."""
        for parameter in self.model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))

    def run_micro_batch(self, _rank, batch):
        """Run forward and backward."""
        self.model(batch).square().mean().backward()


WAYS = {"logical": Logical, "ddp": Plain}


def time_steps(training, steps):
    """Return the wall and the CPU seconds of a step, when all processes have ended."""
    distributed.barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(steps):
        training.step()
    cpu = time.process_time() - cpu
    distributed.barrier()
    return (time.perf_counter() - wall) / steps, cpu / steps


def time_rounds(trainings, steps, rounds):
    """Return wall and CPU seconds of a step by way and round."""
    ways = {name: partial(time_steps, each, steps) for name, each in trainings.items()}
    return alternate(ways, rounds)


def measure_peak(training, folder):
    """Return the peak of torch's CPU allocator within one step, in bytes."""
    training.step()
    training.optimizer.zero_grad()  # the gradients of the last step are not of this one
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        training.step()
    trace = Path(folder, f"trace-{distributed.get_rank()}")
    profile.export_chrome_trace(str(trace))
    events = json.loads(trace.read_text())["traceEvents"]
    changes = sorted((e for e in events if e["name"] == "[memory]"), key=lambda e: e["ts"])
    totals = [e["args"]["Total Allocated"] for e in changes]
    return max(totals) - totals[0]


def work(setting, rounds, folder):
    """Run one process of a setting, and write what it measured."""
    torch.set_num_threads(1)
    disable_malloc_trim()  # as the strategies do, for all ways
    distributed.init_process_group("gloo")
    process = distributed.get_rank()
    blocks = Blocks(setting.logical_ranks, setting.processes)
    arguments = (setting.model, blocks, process)
    trainings = {name: way(*arguments) for name, way in WAYS.items()}
    found = {"times": time_rounds(trainings, setting.steps, rounds)}
    logical = trainings["logical"]
    exchange = logical.sums._exchange  # noqa: SLF001 - only the sums know it
    before = exchange.bytes_sent
    logical.step()
    found["bytes_sent"] = exchange.bytes_sent - before
    found["gradient_bytes"] = sum(p.nbytes for p in logical.model.parameters())
    # The flat buckets are counted, too: they live on between the steps.
    buffers = sum(bucket.flat.nbytes for bucket in logical.sums._buckets)  # noqa: SLF001 - as above
    memory = exchange.memory if setting.processes > 1 else None
    shared = 0 if memory is None else 3 * memory.slot_bytes
    if setting.model == "large":
        bare = measure_peak(Dropped(*arguments), folder)
        peak = measure_peak(logical, folder) + buffers + shared - bare
        found["peak_sets"] = peak / found["gradient_bytes"]
    write_rank(folder, found)
    distributed.barrier()
    os._exit(0)  # the destruction of a Gloo group may wait for its threads


def summarize(setting, found):
    """Return medians of the ratios of rounds, with their quartiles."""
    times = [part["times"] for part in found]
    wall = {way: [wall for wall, _ in own] for way, own in times[0].items()}
    cpu = {
        way: [sum(cpu for _, cpu in each) for each in zip(*(t[way] for t in times), strict=True)]
        for way in WAYS
    }
    processes, logical_ranks = setting.processes, setting.logical_ranks
    summary = {"processes": processes, "logical_ranks": logical_ranks}
    for kind, seconds in (("wall", wall), ("cpu", cpu)):
        summary[f"{kind}_milliseconds"] = {
            way: round(1e3 * statistics.median(values), 2) for way, values in seconds.items()
        }
        over = ratios(seconds["logical"], seconds["ddp"])
        summary[f"{kind}_over_ddp"] = [round(each, 3) for each in over]
    ring = 2 * found[0]["gradient_bytes"] * (processes - 1) / processes
    summary["bytes_sent"] = [part["bytes_sent"] for part in found]
    summary["bytes_over_ring"] = round(max(summary["bytes_sent"]) / ring, 4) if ring else None
    if "peak_sets" in found[0]:
        summary["gradient_sets_at_peak"] = round(max(part["peak_sets"] for part in found), 3)
        largest = len(Blocks(logical_ranks, processes).of(processes - 1))  # the last block
        summary["gradient_sets_allowed"] = math.ceil(math.log2(largest)) + 1
    return summary


def main():
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--settings", nargs="*", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--output", type=Path, default=RESULTS / "logical-ranks-cpu.json")
    parser.add_argument("--work", nargs=3, help=argparse.SUPPRESS)
    words = parser.parse_args()
    if words.work:
        name, rounds, folder = words.work
        work(SETTINGS[name], int(rounds), folder)
    for name in words.settings:
        setting = SETTINGS[name]
        found = run_ranks(setting.processes, __file__, "--work", name, words.rounds)
        entry = {**describe_machine(), "rounds": words.rounds, **summarize(setting, found)}
        keep(words.output, {"settings": {name: entry}})


if __name__ == "__main__":
    main()
