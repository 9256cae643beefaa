"""Measure what gradients of logical ranks cost: time, bytes on the wire, memory, seeds.

    python benchmarks/ranks/logical_ranks.py             everything, about 20 minutes on two cores
    python benchmarks/ranks/logical_ranks.py --rounds 3 --settings small-2-of-2

Processes on this machine, Gloo, one thread each. The processes stay; in each round they run every
way to reduce gradients for some steps, in changing order, so that load affects all alike. A ratio
is that of one round, and the result is the median over rounds. Time is that of a whole step:
forward, backward, reduction, SGD. CPU time is the sum of all processes. The memory of gradients is
the peak that torch's allocator reports for a step, less that of a forward and backward pass that
drops each gradient as soon as it is there, with the memory that the process shares with others.
Bytes sent are those that a process writes to it.
Results go to ``benchmarks/results/logical-ranks-cpu.json``; other settings there are kept.
"""

import argparse
import json
import math
import os
import platform
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_d9m.engine.control.seeding import seed_micro_batch
from lightning_d9m.integrations.strategies.sums.accumulation import KeptGradients
from lightning_d9m.integrations.strategies.sums.gradients import (
    LogicalGradients,
    disable_malloc_trim,
)
from lightning_d9m.integrations.strategies.sums.tree import Blocks

RESULT = Path(__file__).parents[1] / "results" / "logical-ranks-cpu.json"
LIMIT_SECONDS = 1800
# Name: (model, processes, logical ranks, batches of a step, steps per round).
SETTINGS = {
    "small-2-of-2": ("small", 2, 2, 1, 30),
    "small-2-of-4": ("small", 2, 4, 1, 20),
    "small-1-of-4": ("small", 1, 4, 1, 30),
    "small-4-of-4": ("small", 4, 4, 1, 15),
    "small-2-of-2-accumulating": ("small", 2, 2, 2, 15),
    "small-2-of-4-accumulating": ("small", 2, 4, 2, 10),
    "large-2-of-2": ("large", 2, 2, 1, 4),
    "large-2-of-4": ("large", 2, 4, 1, 3),
    "large-1-of-4": ("large", 1, 4, 1, 4),
    "large-4-of-4": ("large", 4, 4, 1, 3),
    "large-2-of-2-accumulating": ("large", 2, 2, 2, 3),
    "large-2-of-4-accumulating": ("large", 2, 4, 2, 2),
}
ROUNDS = 15


def make_model(name):
    """Return 150 small tensors (79,200 parameters) or 24 large ones (13 million)."""
    torch.manual_seed(0)
    layers, width = (75, 32) if name == "small" else (12, 1040)
    linear = [[nn.Linear(width, width), nn.ReLU()] for _ in range(layers)]
    return nn.Sequential(*[layer for pair in linear for layer in pair])


class Training:
    """Steps of one way to reduce gradients."""

    def __init__(self, model, blocks, process, accumulated):
        self.model = make_model(model)
        width = self.model[0].in_features
        self.block = blocks.of(process)
        self.accumulated = accumulated
        self.batches = [torch.randn(32, width) for _ in self.block]
        self.share = 1 / (len(self.block) * accumulated)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-6)
        self.build(blocks, process)

    def step(self):
        """Train on the batches of each logical rank of this process."""
        self.optimizer.zero_grad()
        for left in reversed(range(self.accumulated)):
            for rank, batch in zip(self.block, self.batches, strict=True):
                self.run_micro_batch(rank, batch, is_kept=left > 0)
        self.optimizer.step()


class Logical(Training):
    """The engine of logical ranks."""

    def build(self, blocks, process):
        """Make the engine."""
        self.sums = LogicalGradients(self.model.named_parameters(), blocks, process)
        self.kept = KeptGradients(self.model.named_parameters())

    def run_micro_batch(self, rank, batch, *, is_kept):
        """Run forward and backward."""
        loss = self.model(batch).square().mean() / self.accumulated
        self.kept.put_back(rank)
        if is_kept:
            loss.backward()
            self.kept.keep(rank)
            return
        with self.sums.backward():
            loss.backward()
        (self.sums.finish if rank == self.block[-1] else self.sums.set_aside)(rank)


class Plain(Training):
    """DDP, which accumulates inside ``no_sync()``."""

    def build(self, _blocks, _process):
        """Make the replica."""
        self.replica = DistributedDataParallel(self.model)

    def run_micro_batch(self, rank, batch, *, is_kept):
        """Run forward and backward."""
        last = rank == self.block[-1] and not is_kept
        with nullcontext() if last else self.replica.no_sync():
            (self.replica(batch).square().mean() * self.share).backward()


class Dropped(Training):
    """No gradients are kept: the memory that the model itself needs."""

    def build(self, _blocks, _process):
        """Drop every gradient."""
        for parameter in self.model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))

    def run_micro_batch(self, _rank, batch, *, is_kept):  # noqa: ARG002 - nothing is kept
        """Run forward and backward."""
        self.model(batch).square().mean().backward()


WAYS = {"logical": Logical, "ddp": Plain}


def time_rounds(trainings, steps, rounds):
    """Return wall and CPU seconds per step by way and round."""
    found = {name: [] for name in trainings}
    order = random.Random(0)  # noqa: S311 - no secret
    for training in trainings.values():
        for _ in range(3):
            training.step()
    for _ in range(rounds):
        for name in order.sample(sorted(trainings), len(trainings)):
            distributed.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            for _ in range(steps):
                trainings[name].step()
            cpu = time.process_time() - cpu
            distributed.barrier()
            found[name].append(((time.perf_counter() - wall) / steps, cpu / steps))
    return found


def measure_peak(training, folder):
    """Return the peak of torch's CPU allocator within one step, in bytes."""
    training.step()
    training.optimizer.zero_grad()  # the gradients of the last step are not of this one
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        training.step()
    trace = Path(folder, f"trace-{distributed.get_rank()}.json")
    profile.export_chrome_trace(str(trace))
    events = json.loads(trace.read_text())["traceEvents"]
    trace.unlink()
    changes = sorted((e for e in events if e["name"] == "[memory]"), key=lambda e: e["ts"])
    totals = [e["args"]["Total Allocated"] for e in changes]
    return max(totals) - totals[0]


def work(setting, rounds, folder):
    """Run one process of a setting, and write what it measured."""
    model, processes, logical_ranks, accumulated, steps = SETTINGS[setting]
    torch.set_num_threads(1)
    disable_malloc_trim()  # as the strategies do, for all ways
    distributed.init_process_group("gloo")
    process = distributed.get_rank()
    blocks = Blocks(logical_ranks, processes)
    arguments = (model, blocks, process, accumulated)
    trainings = {name: way(*arguments) for name, way in WAYS.items()}
    found = {"times": time_rounds(trainings, steps, rounds)}
    logical = trainings["logical"]
    before = logical.sums._exchange.bytes_sent  # noqa: SLF001
    logical.step()
    found["bytes_sent"] = logical.sums._exchange.bytes_sent - before  # noqa: SLF001
    found["gradient_bytes"] = sum(p.nbytes for p in logical.model.parameters())
    # The flat buckets are counted, too: they live on between the steps. Only the sums know them.
    buffers = sum(bucket.flat.nbytes for bucket in logical.sums._buckets)  # noqa: SLF001 - see above
    memory = logical.sums._exchange.memory if processes > 1 else None  # noqa: SLF001 - see above
    shared = found["shared_bytes"] = 0 if memory is None else memory.own_bytes
    if model == "large":
        bare = measure_peak(Dropped(*arguments), folder)
        found["peak"] = measure_peak(logical, folder) + buffers + shared - bare
        found["peak_sets"] = found["peak"] / found["gradient_bytes"]
    Path(folder, f"{process}.json").write_text(json.dumps(found))
    distributed.barrier()
    os._exit(0)  # the destruction of a Gloo group may wait for its threads


def launch(setting, rounds):
    """Run all processes of a setting; return what each measured."""
    processes = SETTINGS[setting][1]
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(processes)}
    shared |= {"OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--work", setting, "--folder", folder]
        command += ["--rounds", str(rounds)]
        children = [
            subprocess.Popen(command, env=os.environ | shared | {"RANK": str(rank)})
            for rank in range(processes)
        ]
        assert not any(child.wait(LIMIT_SECONDS) for child in children)
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(processes)]


def summarize(setting, found):
    """Return medians of the ratios of rounds, with their quartiles."""
    _, processes, logical_ranks, accumulated, _ = SETTINGS[setting]
    wall = {way: [t[0] for t in times] for way, times in found[0]["times"].items()}
    cpu = {
        way: [sum(part["times"][way][i][1] for part in found) for i in range(len(times))]
        for way, times in wall.items()
    }
    summary = {"processes": processes, "logical_ranks": logical_ranks}
    for kind, seconds in (("wall", wall), ("cpu", cpu)):
        summary[f"{kind}_milliseconds"] = {
            way: round(1e3 * statistics.median(values), 2) for way, values in seconds.items()
        }
        ratios = [a / b for a, b in zip(seconds["logical"], seconds["ddp"], strict=True)]
        quartiles = statistics.quantiles(ratios, n=4)
        summary[f"{kind}_over_ddp"] = [round(each, 3) for each in quartiles]
    ring = 2 * found[0]["gradient_bytes"] * (processes - 1) / processes
    summary["bytes_sent"] = [part["bytes_sent"] for part in found]
    summary["shared_bytes"] = found[0]["shared_bytes"]
    summary["bytes_over_ring"] = round(max(summary["bytes_sent"]) / ring, 4) if ring else None
    if "peak_sets" in found[0]:
        sets = max(part["peak_sets"] for part in found)
        summary["gradient_sets_at_peak"] = round(sets, 3)
        largest = len(Blocks(logical_ranks, processes).of(processes - 1))  # the last block
        allowed = math.ceil(math.log2(largest)) + 1
        # An accumulation keeps one more set for each logical rank.
        summary["gradient_sets_allowed"] = allowed + (largest if accumulated > 1 else 0)
    return summary


def time_seeding():
    """Return the microseconds that the seeds of one micro-batch take, as quartiles."""
    place = {"fit": 0, "epoch": 3}
    durations = []
    for batch in range(5000):
        began = time.perf_counter()
        seed_micro_batch(7, **place, logical_rank=batch % 8, batch=batch)
        durations.append(1e6 * (time.perf_counter() - began))
    return [round(each, 1) for each in statistics.quantiles(durations, n=4)]


def main():
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--settings", nargs="*", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--output", type=Path, default=RESULT)
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    words = parser.parse_args()
    if words.work:
        work(words.work, words.rounds, words.folder)
    result = json.loads(words.output.read_text()) if words.output.exists() else {"settings": {}}
    result["machine"] = {
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    result["ratios_are"] = "quartiles over rounds"
    result["seeding_microseconds"] = time_seeding()
    for setting in words.settings:
        load = [round(os.getloadavg()[0], 2)]
        found = {
            "when": datetime.now(UTC).isoformat(timespec="seconds"),
            "rounds": words.rounds,
            **summarize(setting, launch(setting, words.rounds)),
        }
        found["load_average"] = [*load, round(os.getloadavg()[0], 2)]
        result["settings"][setting] = found
        print(setting, json.dumps(found, indent=1), flush=True)
        words.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
